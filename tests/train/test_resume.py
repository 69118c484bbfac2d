"""A run that was stopped, however often and at whatever moment, ends as if it had not been."""

from __future__ import annotations

import csv
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from stopping import interrupted, killed

import vitrail
from vitrail.cli import main
from vitrail.config import TrainConfig, load_yaml, override, save_yaml
from vitrail.errors import UserError
from vitrail.train.checkpoint import Checkpoints, checkpoint_path, load_checkpoint

pytestmark = pytest.mark.usefixtures("plain_runs")

# Everything that could be forgotten: an average, two optimisers, randomness in the data and in the model, and
# five steps an epoch of two forward passes each.
SETTINGS = {
    "model": "vit_nano4",
    "img_size": "8",
    "val_fraction": 0.5,
    "epochs": 3,
    "batch_size": 160,
    "grad_accum": 2,
    "model_ema": 0.9,
    "mixup": 0.8,
    "cutmix": 1.0,
    "mix_prob": 0.8,
    "drop_path": 0.1,
    "drop": 0.1,
    "randaug": 1,
    "reprob": 0.2,
    "crop_scale": 0.8,
    "balanced_sampling": True,
    "save_minutes": 0.0,  # a checkpoint after every step
}
STEPS = 15


def command(*words: object) -> list[str]:
    return ["train", *map(str, words)]


def begin(run: Path) -> list[str]:
    flags = [
        word
        for name, value in SETTINGS.items()
        for word in ([f"--{name.replace('_', '-')}"] if value is True else [f"--{name.replace('_', '-')}", value])
    ]
    return command("digits", "--out", run.parent, "--name", run.name, *flags)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The run that nothing interrupted."""
    run = tmp_path_factory.mktemp("straight") / "run"
    with pytest.raises(SystemExit) as ended:
        main(begin(run))
    assert ended.value.code == 0
    return run


@pytest.fixture
def copied(straight, tmp_path):
    """A copy of that run, to be spoiled."""
    return shutil.copytree(straight, tmp_path / "run")


TIMES = ("seconds", "trained", "waited", "wait")


def metrics(run):
    """metrics.csv without the columns that tell the time."""
    with (run / "metrics.csv").open(newline="") as file:
        return [{name: value for name, value in row.items() if name not in TIMES} for row in csv.DictReader(file)]


def timeless(state):
    """A checkpoint as one flat dictionary, without the times in it."""
    if isinstance(state, dict):
        pairs = state.items()
    elif isinstance(state, (list, tuple)):
        pairs = enumerate(state)
    else:
        return {"": state}
    return {
        f"/{name}{rest}": value for name, part in pairs if name not in TIMES for rest, value in timeless(part).items()
    }


def assert_same_end(run, straight):
    assert metrics(run) == metrics(straight)
    assert (run / "model.safetensors").read_bytes() == (straight / "model.safetensors").read_bytes()
    assert (run / "model.json").read_bytes() == (straight / "model.json").read_bytes()
    ours, theirs = (timeless(load_checkpoint(path, "cpu")) for path in (run, straight))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        same = torch.equal(ours[name], value) if isinstance(value, torch.Tensor) else ours[name] == value
        assert same, name
    assert leftovers(run) == []
    assert {path.name for path in run.iterdir()} == {path.name for path in straight.iterdir()}


def leftovers(run):
    return [path.name for path in run.rglob("*.tmp")]


def test_the_run_to_compare_with_is_worth_it(straight):
    state = load_checkpoint(straight, "cpu")
    assert state["progress"]["step"] == STEPS
    assert len(metrics(straight)) == SETTINGS["epochs"]
    assert {"optimizer 0", "optimizer 1"} <= state.keys()
    assert any(not torch.equal(state["model"][name], value) for name, value in state["kept"].items())


def test_a_run_that_was_killed_again_and_again_ends_the_same(straight, tmp_path, vitrail_says, caplog):
    caplog.set_level("INFO", "vitrail")
    first, second, run = tmp_path / "first", tmp_path / "second", tmp_path / "third"

    # Before there is a checkpoint, and in the middle of an epoch.
    with killed(first, second, "state.pt"):
        main(begin(first))
    assert load_checkpoint(second, "cpu") is None
    with killed(second, run, "state.pt", 3):
        main(command("--resume", second))
    assert load_checkpoint(run, "cpu")["progress"]["step"] == 2

    # Politely: it saves at the end of the step, and says how to go on.
    with interrupted("state.pt", 2):
        code, *_ = vitrail_says(*command("--resume", run))
    assert code == 130
    assert f"vitrail train --resume {run}" in caplog.text
    at = load_checkpoint(run, "cpu")["progress"]["step"]
    assert 4 <= at < STEPS

    vitrail.train(resume=run)
    assert f"Resuming after step {at}." in (run / "train.log").read_text()
    assert_same_end(run, straight)


def test_a_kill_between_any_two_files_loses_nothing(tmp_path, small, monkeypatch):
    """Copies the run folder just before each file takes its place, as a kill would leave it, and goes on from there."""
    run, moments = tmp_path / "run", []

    def watched(source, target):
        if "evaluation" not in str(target):
            moments.append(shutil.copytree(run, tmp_path / f"{len(moments)}-before-{Path(target).name}"))
        return replace(source, target)

    replace = Path.replace
    settings = {**small, "epochs": 2, "batch_size": 400, "model_ema": 0.5, "drop": 0.1}
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", watched)
        vitrail.train("digits", out=tmp_path, name="run", **settings)

    written = {moment.name.split("-before-")[1] for moment in moments}
    assert written >= {"state.pt", "model.json", "model.safetensors", "metrics.csv"}
    for moment in moments:
        assert leftovers(moment)  # the new file under its temporary name
        vitrail.train(resume=moment)
        assert_same_end(moment, run)


def test_a_finished_run_is_left_as_it_is(straight, copied):
    vitrail.train(resume=copied)
    assert_same_end(copied, straight)


def test_a_run_goes_on_after_it_was_moved(straight, copied, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.move(copied, tmp_path / "moved")
    vitrail.train(resume="moved")
    assert_same_end(tmp_path / "moved", straight)


@pytest.mark.parametrize(
    "asked",
    [{}, {"epochs": SETTINGS["epochs"], "model": "ViT-nano/4", "img_size": 8, "lr": 0.004}, {"model": "vit"}],
    ids=str,
)
def test_the_same_settings_may_be_given_again(copied, asked):
    assert vitrail.train("digits", resume=copied, **asked) == copied


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"model": "vit_b16"}, "model vit_b16 instead of vit_nano4"),
        ({"model": "swin"}, "model swin instead of vit_nano4"),
        ({"lr": 0.5}, "lr 0.5 instead of 0.004"),
        ({"img_size": 16}, "img_size"),
        ({"epochs": 2, "seed": 3}, "already has 3 epochs"),
        ({"data": "fashion-mnist"}, "data fashion-mnist instead of digits"),
        ({"learning_rate": 0.5}, "no setting 'learning_rate'"),
    ],
    ids=str,
)
def test_a_run_does_not_go_on_as_another(straight, asked, message):
    before = snapshot(straight)
    with pytest.raises(UserError, match=message):
        vitrail.train(resume=straight, **asked)
    assert snapshot(straight) == before


def snapshot(run):
    return {path: path.read_bytes() for path in Path(run).rglob("*") if path.is_file()}


def test_how_a_run_is_carried_out_may_change(tmp_path, small):
    run = vitrail.train("digits", out=tmp_path, name="run", **small)
    checkpoint_path(run).unlink()
    before = snapshot(run)
    with pytest.raises(UserError, match="'workers' must be at least 1"):  # so it is not ignored
        vitrail.train(resume=run, workers=0)
    assert snapshot(run) == before
    vitrail.train(resume=run, workers=1, save_minutes=0.0)


@pytest.mark.parametrize("there", [False, True])
def test_a_folder_that_is_no_run_does_not_go_on(tmp_path, there):
    folder = tmp_path / "folder"
    if there:
        folder.mkdir()
    with pytest.raises(UserError, match=r"folder is not a run: it has no config\.yaml"):
        vitrail.train(resume=folder)
    assert list(tmp_path.iterdir()) == ([folder] if there else [])


@pytest.fixture
def on_arrays(tmp_path, tiny):
    """A run on an .npz file that may be changed."""
    rng = np.random.default_rng(0)
    arrays = {"images": rng.integers(0, 256, (100, 8, 8), dtype=np.uint8), "labels": np.arange(100) % 4}
    np.savez(tmp_path / "data.npz", **arrays)
    run = vitrail.train(tmp_path / "data.npz", out=tmp_path, name="run", **tiny)
    return run, tmp_path / "data.npz", arrays


@pytest.mark.parametrize("change", ["labels", "fewer", "classes"])
def test_a_run_does_not_go_on_with_other_data(on_arrays, change):
    run, path, arrays = on_arrays
    if change == "labels":
        arrays["labels"] = arrays["labels"][::-1]
    elif change == "fewer":
        arrays = {name: values[:-4] for name, values in arrays.items()}
    else:
        arrays["classes"] = np.array(["a", "b", "c", "d"])
    np.savez(path, **arrays)
    with pytest.raises(UserError, match="The data has changed since the run began"):
        vitrail.train(resume=run)


def truncated(content):
    return content[: len(content) // 2]


def headless(content):
    return b"\0" * 4096 + content[4096:]


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


@pytest.mark.parametrize(
    "spoil",
    [
        truncated,
        headless,
        lambda _: b"",
        lambda _: b"this is not a checkpoint",
        lambda _: os.urandom(5000),
        lambda _: pickle.dumps({"model": 1}, protocol=2),
        lambda _: pickle.dumps(Bomb(), protocol=2),
    ],
    ids=["truncated", "headless", "empty", "text", "noise", "pickle", "bomb"],
)
def test_a_corrupt_checkpoint_is_refused_by_name(copied, spoil, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = checkpoint_path(copied)
    path.write_bytes(spoil(path.read_bytes()))
    before = path.read_bytes()
    with pytest.raises(
        UserError, match=rf"The checkpoint {path} is corrupt: .* Delete {path.parent} to restart the run"
    ):
        vitrail.train(resume=copied)
    assert path.read_bytes() == before
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    "content", [{"something": "else"}, [1, 2], torch.zeros(3), Bomb()], ids=["dict", "list", "tensor", "bomb"]
)
def test_a_checkpoint_of_something_else_is_refused_by_name(copied, content, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(content, checkpoint_path(copied))
    with pytest.raises(UserError, match=str(checkpoint_path(copied))):
        vitrail.train(resume=copied)
    assert not (tmp_path / "exploded").exists()


def test_a_checkpoint_of_another_model_is_refused_by_name(copied):
    config = load_yaml(TrainConfig, copied / "config.yaml")
    save_yaml(override(config, {"registers": 2}), copied / "config.yaml")
    with pytest.raises(UserError, match=str(checkpoint_path(copied))):
        vitrail.train(resume=copied)


def test_a_checkpoint_replaces_the_one_before(tmp_path):
    assert load_checkpoint(tmp_path, "cpu") is None
    tensor = torch.zeros(4)
    with Checkpoints(tmp_path) as checkpoints:
        for number in range(3):
            checkpoints.save({"number": number, "tensor": tensor})
            tensor += 1  # training goes on while the thread writes
            checkpoints.wait()
            state = load_checkpoint(tmp_path, "cpu")
            assert state["number"] == number
            assert torch.equal(state["tensor"], torch.full((4,), float(number)))
    assert [path.name for path in checkpoint_path(tmp_path).parent.iterdir()] == ["state.pt"]


# A file that grows beyond the limit fails as on a full disk: the system writes what fits, then refuses. The process
# imports torch once, and forks for each case.
FULL = """
import os, resource, sys
from pathlib import Path
import sklearn.datasets, torch._dynamo
import vitrail.train.checkpoint, vitrail.train.start, vitrail.verbs.train
from vitrail.cli import main

def save(run):
    with vitrail.train.checkpoint.Checkpoints(Path(run)) as checkpoints:
        checkpoints.save({"large": torch.zeros(100_000)})

def train(run):
    words = "--epochs 0.2 --batch-size 256 --model vit_nano4 --img-size 8 --name".split()
    main(["train", "digits", *words, Path(run).name, "--out", str(Path(run).parent)])

for what, run, limit in zip(*3 * [iter(sys.argv[1:])]):
    if child := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(f"{what} ended with {code}", file=sys.stderr, flush=True)
        continue
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
    globals()[what](run)
    break
"""


def test_a_full_disk_ends_with_one_sentence_and_leaves_the_earlier_checkpoint(tmp_path):
    pytest.importorskip("resource")
    saved, none, begun = tmp_path / "saved", tmp_path / "none", tmp_path / "begun"
    saved.mkdir()
    with Checkpoints(saved) as checkpoints:
        checkpoints.save({"good": torch.arange(5)})
    cases = (("save", saved, 100_000), ("train", none, 100), ("train", begun, 1_000_000))
    words = [str(word) for case in cases for word in case]
    said = subprocess.run([sys.executable, "-c", FULL, *words], capture_output=True, text=True, check=True).stderr
    saving, creating, writing, end = re.split(r"^\w+ ended with (?:1|2)\n", said, flags=re.M)
    assert end == ""

    assert saving.splitlines()[-1].startswith(
        f"vitrail.errors.UserError: Could not write {checkpoint_path(saved)}: File too large."
    )
    assert torch.equal(load_checkpoint(saved, "cpu")["good"], torch.arange(5))
    assert [path.name for path in checkpoint_path(saved).parent.iterdir()] == ["state.pt"]

    for told, sentence in (
        (creating, f"The run folder {none} cannot be created: File too large."),
        (writing, f"Could not write {begun}/model.safetensors: File too large."),
    ):
        assert told.splitlines()[-1].startswith(f"vitrail: {sentence}")
        assert "Traceback" not in told
    assert leftovers(tmp_path) == []
    assert not none.exists()  # what never began leaves nothing behind
    assert begun.exists()
    assert not (begun / "model.safetensors").exists()
