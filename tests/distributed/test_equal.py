"""The same run on one, two and four processes: tasks, methods, optimisers, DDP and FSDP2."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import boxes_made
import captioned
import numpy as np
import pytest
import segmented
from conftest import TINY
from distributed.launch import environment, torchrun
from distributed.worker import Case, train_all
from safetensors.numpy import load_file

import vitrail

WORKER = Path(__file__).parent / "worker.py"

# Everything that is drawn at random, and the moving average.
RANDOM: dict[str, Any] = {
    **{"drop": 0.1, "drop_path": 0.2, "mixup": 0.4, "cutmix": 1.0, "randaug": 2, "reprob": 0.3, "shift": 1},
    **{"hflip": 0.5, "crop_scale": 0.6, "color_jitter": 0.2, "smoothing": 0.1, "model_ema": 0.9},
}
LONG = TINY | RANDOM | {"epochs": 50 / 22, "lr": 1e-3}  # the recipe's rate is unstable with so much noise
SHORT = TINY | {"epochs": 0.2}  # four steps
SHARDED = ("words", "words-softmax", "bf16")  # in any case
DENSE = TINY | {"img_size": 32, "batch_size": 8, "epochs": 2}


LONG_CASES: dict[str, Case] = {
    "plain": ("train", "digits", LONG),
    "accumulated": ("train", "digits", LONG | {"grad_accum": 2}),
}


def short_cases(folder: Path, weights: Path) -> dict[str, Case]:
    """Tasks, methods and optimisers, a few steps of each."""
    rng, images = np.random.default_rng(0), np.arange(64 * 64).reshape(64, 8, 8) % 251
    for name, labels in (
        ("labels", rng.integers(0, 2, (64, 3)).astype(np.uint8)),
        ("numbers", rng.normal(size=(64, 2)).astype(np.float32)),
    ):
        np.savez(folder / f"{name}.npz", images=images.astype(np.uint8), labels=labels)
    np.savez(folder / "shades.npz", images=images.astype(np.uint8), labels=np.array(["a", "b"])[np.arange(64) % 2])
    masks, boxes = str(folder / "mask-shards"), str(folder / "box-shards")
    vitrail.shard(segmented.folder(folder / "masks"), masks, shard_size="9")
    vitrail.shard(boxes_made.voc(folder / "boxes", 20), boxes, shard_size="9")
    words = str(captioned.captioned(folder / "words"))
    few: dict[str, Any] = {**SHORT, "batch_size": 16, "epochs": 2}
    pretrained = {**SHORT, "drop_path": 0.2}
    crops = pretrained | {"epochs": 2, "val_fraction": 0.8}  # ten steps; DINO's last layer is frozen in the first
    maps = {name: value for name, value in SHORT.items() if name != "stem"}
    maps |= {"drop_path": 0.1, "img_size": 32, "batch_size": 16, "epochs": 0.05}
    return {
        "labels": ("train", str(folder / "labels.npz"), few),
        "numbers": ("train", str(folder / "numbers.npz"), few),
        "masks": ("train", masks, DENSE | {"loss": "dice"}),
        "boxes": ("train", boxes, DENSE | {"head": "fcos"}),
        "detr": ("train", boxes, DENSE | {"head": "detr"}),
        "words": ("train", words, captioned.SETTINGS | {"epochs": 2, "drop_path": 0.1}),
        "words-softmax": ("train", words, captioned.SETTINGS | {"epochs": 1, "loss": "softmax"}),
        **{f"method-{m}": ("pretrain", "digits", pretrained | {"method": m}) for m in ("masked", "mae", "simmim")},
        **{f"method-{m}": ("pretrain", "digits", crops | {"method": m}) for m in ("dino", "lejepa")},
        **{f"opt-{opt}": ("train", "digits", SHORT | {"opt": opt}) for opt in ("sgd", "muon", "lamb")},
        "lora": ("train", "digits", SHORT | {"weights": str(weights), "lora_rank": 2, "batch_size": 32}),
        "head": ("train", str(folder / "shades.npz"), few | {"weights": str(weights)}),
        "taught": ("train", "digits", SHORT | {"teacher": str(weights), "shift": 1}),
        "norms": ("train", "digits", maps | {"model": "coatnet_nano"}),
        "windows": ("train", "digits", maps | {"model": "swin_nano", "drop": 0.1}),
        "bf16": ("train", "digits", SHORT | {"amp": "bf16", "grad_checkpointing": True}),
        "eager": ("train", "digits", SHORT | {"drop_path": 0.1}),
    }


def changed(case: Case, **how: Any) -> Case:
    verb, data, settings = case
    return verb, data, settings | how


def shared(cases: dict[str, Case]) -> dict[str, Case]:
    """Every second case sharded: which weights are, is decided by the stages of the model, not by its task."""
    return {
        name: changed(case, shard="full" if number % 2 or name in SHARDED else "off")
        for number, (name, case) in enumerate(cases.items())
    }


def together(processes: int, cases: dict[str, Case], out: Path) -> dict[str, list[float]]:
    """The losses of all steps of runs that processes share."""
    out.mkdir()
    (out / "cases.json").write_text(json.dumps(cases))
    command = torchrun(processes, str(WORKER), str(out / "cases.json"), str(out))
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads((out / "losses.json").read_text())


def scores(run: Path) -> dict[str, float]:
    return json.loads((run / "model.json").read_text())["metrics"]


@pytest.fixture(scope="module")
def alone(trained, tmp_path_factory):
    """Runs of one process: their folder, cases and losses."""
    out = tmp_path_factory.mktemp("alone")
    cases = LONG_CASES | short_cases(tmp_path_factory.mktemp("data"), trained)
    return out, cases, train_all(cases, out)


def compare(processes: int, cases: dict[str, tuple[str, Case]], alone: Any, folder: Path) -> None:
    """Several processes have the losses, the scores and the weights of one: each case with the name of its run."""
    out, _, expected = alone
    losses = together(processes, {name: case for name, (_, case) in cases.items()}, folder)
    for name, (before, _) in cases.items():
        tolerance = 1e-5 if before in LONG_CASES else 2e-2 if before == "bf16" else 2e-5
        assert len(losses[name]) == 50 or before not in LONG_CASES
        np.testing.assert_allclose(losses[name], expected[before], rtol=tolerance, err_msg=name)
        ours, theirs = scores(folder / name), scores(out / before)
        assert ours.get("images") == theirs.get("images")
        assert ours.get("loss") == (pytest.approx(theirs["loss"], rel=10 * tolerance) if "loss" in theirs else None)
        shapes = [
            {key: value.shape for key, value in load_file(run / "model.safetensors").items()}
            for run in (folder / name, out / before)
        ]
        assert shapes[0] == shapes[1]


def test_two_processes_train_as_one_does(alone, tmp_path):
    known = alone[1]
    short = {name: case for name, case in known.items() if name not in ("eager", *LONG_CASES)}
    cases = {name: (name, case) for name, case in shared(short).items()}
    for shard in ("off", "full"):
        halves = changed(known["accumulated"], shard=shard, grad_checkpointing=shard == "full")
        cases[f"accumulated-{shard}"] = "accumulated", halves
        cases[f"compiled-{shard}"] = "eager", changed(known["eager"], compile=True, shard=shard)
    compare(2, cases, alone, tmp_path / "out")


def test_four_processes_train_as_one_does(alone, tmp_path):
    plain, eager = alone[1]["plain"], alone[1]["eager"]
    cases = {"plain": ("plain", plain), "sharded": ("plain", changed(plain, shard="full"))}
    compare(4, cases | {"hybrid": ("eager", changed(eager, shard="hybrid"))}, alone, tmp_path / "out")
