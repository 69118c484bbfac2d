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

WORKER = Path(__file__).parent / "worker.py"

# Everything that is drawn at random, and the moving average.
RANDOM: dict[str, Any] = {
    **{"drop": 0.1, "drop_path": 0.2, "mixup": 0.4, "cutmix": 1.0, "randaug": 2, "reprob": 0.3, "shift": 1},
    **{"hflip": 0.5, "crop_scale": 0.6, "color_jitter": 0.2, "smoothing": 0.1, "model_ema": 0.9},
}
LONG = TINY | RANDOM | {"epochs": 50 / 22, "lr": 1e-3}  # the recipe's rate is unstable with so much noise
SHORT = TINY | {"epochs": 0.2}  # four steps
DENSE = TINY | {"img_size": 32, "batch_size": 8, "epochs": 2}


def long_cases() -> dict[str, Case]:
    return {
        "plain": ("train", "digits", LONG),
        "accumulated": ("train", "digits", LONG | {"grad_accum": 2}),
        "sharded": ("train", "digits", LONG | {"shard": "full"}),
        "sharded-accumulated": (
            "train",
            "digits",
            LONG | {"shard": "full", "grad_accum": 2, "grad_checkpointing": True},
        ),
    }


def short_cases(folder: Path, weights: Path) -> dict[str, Case]:
    """Tasks, methods and optimisers, a few steps of each."""
    rng, images = np.random.default_rng(0), np.arange(64 * 64).reshape(64, 8, 8) % 251
    for name, labels in (
        ("labels", rng.integers(0, 2, (64, 3)).astype(np.uint8)),
        ("numbers", rng.normal(size=(64, 2)).astype(np.float32)),
    ):
        np.savez(folder / f"{name}.npz", images=images.astype(np.uint8), labels=labels)
    masks, boxes = str(segmented.folder(folder / "masks")), str(boxes_made.voc(folder / "boxes", 20))
    words = str(captioned.captioned(folder / "words"))
    few: dict[str, Any] = {**SHORT, "batch_size": 16, "epochs": 2}
    pretrained = {**SHORT, "drop_path": 0.2}
    crops = pretrained | {"epochs": 2, "val_fraction": 0.8}  # DINO's last layer learns from the second epoch on
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
        "taught": ("train", "digits", SHORT | {"teacher": str(weights), "shift": 1}),
        "norms": ("train", "digits", maps | {"model": "coatnet_nano"}),
        "windows": ("train", "digits", maps | {"model": "swin_nano", "drop": 0.1}),
    }


def shared(cases: dict[str, Case]) -> dict[str, Case]:
    """Every second case sharded: which weights are, is decided by the stages of the model, not by its task."""
    return {
        name: (verb, data, how | {"shard": "full" if number % 2 and not name.startswith("words") else "off"})
        for number, (name, (verb, data, how)) in enumerate(cases.items())
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
def alone(tmp_path_factory):
    out = tmp_path_factory.mktemp("alone")
    cases = {name: case for name, case in long_cases().items() if "shard" not in name}
    return out, train_all(cases, out)


@pytest.mark.parametrize("processes", [2, 4])
def test_fifty_steps_are_the_same(processes, alone, tmp_path):
    out, expected = alone
    cases = long_cases() if processes == 2 else {n: c for n, c in long_cases().items() if "accumulated" not in n}
    losses = together(processes, cases, tmp_path / "out")
    for name in cases:
        before = name.removeprefix("sharded-").replace("sharded", "plain")
        assert len(losses[name]) == 50
        np.testing.assert_allclose(losses[name], expected[before], rtol=1e-5, err_msg=name)
        assert scores(tmp_path / "out" / name)["images"] == scores(out / before)["images"]
        assert scores(tmp_path / "out" / name)["loss"] == pytest.approx(scores(out / before)["loss"], rel=1e-4)
        ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out" / name, out / before))
        assert {key: value.shape for key, value in ours.items()} == {key: v.shape for key, v in theirs.items()}


def test_every_task_method_and_optimiser_is_the_same(trained, tmp_path):
    cases = short_cases(tmp_path, trained)
    (tmp_path / "alone").mkdir()
    expected = train_all(cases, tmp_path / "alone")
    losses = together(2, shared(cases), tmp_path / "together")
    for name in cases:
        np.testing.assert_allclose(losses[name], expected[name], rtol=2e-5, err_msg=name)
        ours, theirs = (scores(tmp_path / folder / name) for folder in ("together", "alone"))
        measured = "images" if "images" in theirs else "loss"
        assert ours[measured] == pytest.approx(theirs[measured], rel=1e-4)
