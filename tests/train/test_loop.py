"""Training itself: that it learns, that it is what its settings say, and what it leaves behind."""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
from dataclasses import asdict

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from torch._dynamo.utils import counters

import vitrail
from vitrail.config import TrainConfig, load_yaml, override, save_yaml
from vitrail.errors import UserError
from vitrail.train.checkpoint import checkpoint_path, load_checkpoint
from vitrail.weights import load

pytestmark = pytest.mark.usefixtures("plain_runs")

# Nothing random but the order of the images.
PLAIN = {"shift": 0, "smoothing": 0.0, "mixup": 0.0, "drop_path": 0.0, "clip_grad": 0.0}


@pytest.fixture
def train(tmp_path):
    """Trains on digits with these settings into a folder of its own."""

    def train(**settings):
        return vitrail.train("digits", out=tmp_path, **settings)

    return train


def rows(run):
    with (run / "metrics.csv").open(newline="") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def timeless(run):
    return [{name: value for name, value in row.items() if name not in ("seconds", "wait")} for row in rows(run)]


def last(run):
    return load_checkpoint(run, "cpu")["model"]


def assert_close(run, other, **tolerance):
    theirs = last(other)
    for name, value in last(run).items():
        torch.testing.assert_close(value, theirs[name], msg=lambda text, name=name: f"{name}: {text}", **tolerance)


# It learns


def test_digits_are_learnt(train):
    run = train(model="vit_nano4", img_size=8, epochs=4, batch_size=96, lr=0.006, seed=1)
    assert vitrail.evaluate(run).top1 >= 0.95


@pytest.mark.parametrize("opt", ["sgd", "adamw", "muon", "lamb"])
def test_every_optimiser_learns(train, small, opt):
    learnt = rows(train(**{**small, "epochs": 2}, opt=opt, lr={"sgd": 0.1, "lamb": 0.02}.get(opt, 0.005)))
    assert learnt[-1]["train_loss"] < learnt[0]["train_loss"] - 0.05 < math.log(10)
    assert learnt[-1]["val_top1"] > 0.2


def test_a_fresh_head_begins_with_the_binary_loss_of_chance(train, tiny):
    """log(10) + 9 log(10 / 9) for 10 classes; half chances for each, as without the bias, would be 6.9."""
    first = rows(train(**{**tiny, "batch_size": 2048}, loss="bce", smoothing=0.0, mixup=0.0))[0]
    assert first["train_loss"] == pytest.approx(math.log(10) + 9 * math.log(10 / 9), rel=0.02)


def test_the_binary_loss_learns(train, tiny):
    learnt = rows(train(**{**tiny, "epochs": 3}, loss="bce", lr=0.005))
    assert learnt[-1]["train_loss"] < learnt[0]["train_loss"] - 0.05
    assert learnt[-1]["val_top1"] > 0.3


def test_half_precision_learns_about_the_same(train, small):
    full, *halves = (rows(train(**small | {"name": amp, "amp": amp})) for amp in ("off", "bf16", "fp16"))
    for half in halves:
        assert half[0]["val_loss"] != full[0]["val_loss"]
        assert half[0]["val_loss"] == pytest.approx(full[0]["val_loss"], rel=0.05)


# It is what its settings say


def test_a_seed_gives_the_same_numbers_again_and_another_gives_others(train, small):
    settings = {**small, "drop": 0.1, "mixup": 0.5, "shift": 1}
    first, again, other = (train(**settings, seed=seed) for seed in (1, 1, 2))
    assert timeless(first) == timeless(again)
    assert_close(first, again, rtol=0, atol=0)
    assert timeless(first) != timeless(other)


def test_threads_and_the_time_of_saving_do_not_change_the_numbers(train, small):
    settings = {**small, "crop_scale": 0.5}
    first, other = train(**settings, workers=1), train(**settings, workers=3, save_minutes=0.0)
    assert_close(first, other, rtol=0, atol=0)


def test_two_half_batches_are_as_good_as_a_whole(train, small):
    settings = {**small, **PLAIN, "opt": "sgd", "lr": 0.05}
    whole = train(**settings)
    halves = train(**{**settings, "grad_accum": 2})
    assert rows(whole)[-1]["step"] == rows(halves)[-1]["step"]
    assert rows(whole)[-1]["train_loss"] == pytest.approx(rows(halves)[-1]["train_loss"], rel=1e-4)
    assert_close(whole, halves, rtol=1e-3, atol=1e-5)


def test_recomputed_activations_give_the_same_weights(train, small):
    settings = {**small, "drop": 0.2, "drop_path": 0.2}
    assert_close(train(**settings), train(**settings, grad_checkpointing=True), rtol=0, atol=0)


@pytest.mark.parametrize("more", [{"model_ema": 0.9}, {"drop": 0.1, "grad_checkpointing": True}], ids=str)
def test_a_compiled_model_gives_nearly_the_same_weights(train, small, more, monkeypatch):
    """All of torch.compile but its C++ compiler, which takes long; tests/models runs that."""
    compile = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda model: compile(model, backend="aot_eager"))
    settings = {**small, **PLAIN, "opt": "sgd", "lr": 0.05, **more}
    eager = train(**settings)
    torch.compiler.reset()
    counters.clear()
    compiled = train(**settings, compile=True)
    assert counters["stats"]["unique_graphs"] > 0
    assert not counters["graph_break"]
    assert last(compiled).keys() == last(eager).keys()
    assert_close(compiled, eager, rtol=1e-3, atol=1e-5)


def test_the_gradient_is_clipped(train, small):
    """With a gradient that is clipped to nothing, SGD cannot move anything but by weight decay."""
    run = train(**{**small, "clip_grad": 1e-12}, opt="sgd", lr=0.1, weight_decay=0.0)
    before = load_file(small["weights"])
    for name, value in last(run).items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=1e-7)


def test_the_average_is_what_is_kept(train, small):
    run = train(**small, model_ema=0.9)
    kept, state = load_file(run / "model.safetensors"), load_checkpoint(run, "cpu")
    assert all(torch.equal(value, state["kept"][name]) for name, value in kept.items())
    assert any(not torch.equal(value, state["model"][name]) for name, value in kept.items())


def test_the_best_epoch_is_kept_rather_than_the_last(train, small):
    run = train(**small, opt="sgd", lr=0.1)
    best = snapshot(run)
    change(run, epochs=2, lr=100.0)
    vitrail.train(resume=run)
    scores = [row["val_top1"] for row in rows(run)]
    assert scores[1] < scores[0], "this test needs a run that gets worse"
    assert snapshot(run) == best
    assert f"Kept epoch 1 of 2: top-1 {scores[0]:.1%}, the best." in (run / "train.log").read_text()
    assert vitrail.evaluate(run).top1 == pytest.approx(scores[0], abs=1e-6)


def snapshot(run):
    return [(run / name).read_bytes() for name in ("model.safetensors", "model.json")]


def change(run, **settings):
    """Changes the settings of a run behind its back."""
    save_yaml(override(load_yaml(TrainConfig, run / "config.yaml"), settings), run / "config.yaml")


def test_the_learning_rate_of_the_run_is_that_of_the_schedule(train, small):
    run = train(**{**small, "epochs": 4}, sched="linear", warmup_epochs=1.0, lr=0.01, min_lr=0.1)
    steps = 899 // 64
    assert [row["step"] for row in rows(run)] == [steps, 2 * steps, 3 * steps, 4 * steps]
    expected = [1.0] + [0.1 + 0.9 * (1 - (k * steps - 1) / (3 * steps)) for k in (1, 2, 3)]
    assert [row["lr"] / 0.01 for row in rows(run)] == pytest.approx(expected)


def test_a_run_may_end_within_an_epoch(train, small):
    run = train(**{**small, "epochs": 1.5}, warmup_epochs=0.0, sched="linear", lr=0.01)
    steps = 899 // 64
    assert [row["step"] for row in rows(run)] == [steps, round(1.5 * steps)]
    assert rows(run)[-1]["lr"] == pytest.approx(0.01 / round(1.5 * steps))  # the decay ends with the run


# When it goes wrong


def test_a_loss_that_is_not_finite_stops_the_run(train, small, tmp_path):
    with pytest.raises(UserError) as caught:
        train(**{**small, "warmup_epochs": 0.0}, lr=1e30, name="run")
    message = str(caught.value)
    assert re.search(r"diverged at step 1 with learning rate 9\.\d+e\+29", message)
    assert "There is no checkpoint yet." in message
    assert "lower --lr" in message
    assert message in (tmp_path / "run" / "train.log").read_text()


def test_the_last_good_checkpoint_is_named_and_is_not_spoilt(train, small):
    run = train(**small, name="run")
    good = checkpoint_path(run).read_bytes()
    change(run, epochs=2, lr=1e30)
    with pytest.raises(UserError, match=f"The last good checkpoint is {checkpoint_path(run)}"):
        vitrail.train(resume=run)
    assert checkpoint_path(run).read_bytes() == good
    assert load(run)


def test_a_model_that_explodes_in_the_last_step_of_an_epoch_is_told_alike(train, small, tmp_path):
    with pytest.raises(UserError, match=r"diverged at step \d+ with learning rate .* lower --lr"):
        train(**{**small, "batch_size": 2048}, opt="adamw", lr=1e30, name="run")
    assert not (tmp_path / "run" / "model.safetensors").exists()


# What it leaves behind


def test_a_run_folder_holds_all_that_is_known(trained):
    run = trained
    assert {path.name for path in run.iterdir()} == {
        ".lock",
        "config.yaml",
        "model.safetensors",
        "model.json",
        "last",
        "metrics.csv",
        "tensorboard",
        "train.log",
        "curves.png",
        "evaluation",
        "report.html",
    }
    assert load_yaml(TrainConfig, run / "config.yaml").optim.epochs == 2
    assert [row["epoch"] for row in rows(run)] == [1, 2]
    for figure in (run / "curves.png", run / "evaluation" / "digits-val" / "confusion.png"):
        with Image.open(figure) as image:
            image.load()
            assert min(image.size) > 200
    log = (run / "train.log").read_text()
    assert all(f"epoch {epoch}/2" in log for epoch in (1, 2))
    assert "1,438 train, 359 val; multi-class, 10 classes" in log
    assert log.count("waited for data") == 2
    assert all(0 <= row["wait"] < 1 for row in rows(run))


@pytest.mark.parametrize("crop_scale", [1.0, 0.5])
def test_a_cache_changes_nothing(digits, small, tmp_path, crop_scale):
    settings = {**small, "crop_scale": crop_scale, "out": tmp_path}
    for name, cache_gb in (("without", 0.0), ("making", 1.0), ("with", 1.0)):
        vitrail.train(digits, **settings, name=name, cache_gb=cache_gb)
    for name in ("making", "with"):
        assert timeless(tmp_path / name) == timeless(tmp_path / "without")
        assert_close(tmp_path / name, tmp_path / "without", rtol=0, atol=0)


def test_the_model_can_be_read_without_vitrail(train, small):
    run = train(**small)
    tensors, card = load_file(run / "model.safetensors"), json.loads((run / "model.json").read_text())
    assert card["classes"] == list("0123456789")
    seen = {"img_size": [8, 8], "channels": 1, "crop": 1.0, "mean": [0.5], "std": [0.5], "bits": 8}
    seen |= {"interpolation": "bicubic", "fit": "crop"}
    assert card["preprocess"] == seen
    assert tensors["head.weight"].shape == (10, card["config"]["width"])
    assert card["config"] == json.loads(json.dumps(asdict(load(run).config)))
    assert 0 < card["metrics"]["top1"] <= 1


def test_tensorboard_shows_what_metrics_csv_holds(train, small):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = train(**{**small, "epochs": 10, "val_fraction": 0.9})  # some within a second, and one of two digits
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    for name in ("train_loss", "val_loss", "val_top1", "lr"):
        shown = [(event.step, event.value) for event in events.Scalars(name)]
        assert shown == [(row["epoch"], pytest.approx(row[name])) for row in rows(run)], name


def test_an_existing_run_is_not_touched(train, small, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "file").write_text("mine")
    with pytest.raises(UserError, match=r"run exists\. Choose another --name, continue it with"):
        train(**small, name="run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["file"]


def test_overwrite_replaces_a_run_and_nothing_else(train, small, tmp_path):
    run = train(**small, name="run")
    (run / "old").touch()
    assert train(**small, name="run", overwrite=True) == run
    assert not (run / "old").exists()
    assert (run / "model.safetensors").exists()

    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "holiday.jpg").touch()
    with pytest.raises(UserError, match="exists and is not a vitrail run, so --overwrite does not"):
        train(**small, name="photos", overwrite=True)
    assert (tmp_path / "photos" / "holiday.jpg").exists()


def test_overwrite_never_costs_the_weights_to_begin_from(train, small):
    run = train(**small, name="run")
    with pytest.raises(UserError, match="run"):
        train(weights=run, epochs=1, name="run", overwrite=True)
    assert load(run)


@pytest.mark.parametrize(
    "wrong",
    [
        {"grad_accum": 100},
        {"pool": "cls"},
        {"registers": 2},
        {"device": "cuda:77"},
        {"recipe": "smal"},
    ],
    ids=str,
)
def test_what_cannot_begin_leaves_no_run_behind(train, small, tmp_path, wrong):
    with pytest.raises(UserError):
        train(**{**small, **wrong}, name="run")
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_begin_costs_no_earlier_run(train, small):
    run = train(**small, name="run")
    with pytest.raises(UserError):
        train(**small, name="run", grad_accum=100, overwrite=True)
    assert load(run)


@pytest.mark.parametrize(
    "wrong", [{"seed": "one"}, {"seed": -1}, {"val_fraction": "half"}, {"val_fraction": 2}], ids=str
)
def test_settings_that_the_data_needs_are_checked_too(train, small, tmp_path, wrong):
    with pytest.raises(UserError, match=next(iter(wrong))):
        train(**{**small, **wrong})
    assert list(tmp_path.iterdir()) == []


def test_there_must_be_something_to_train_on():
    with pytest.raises(UserError, match="Give a data set, or --resume RUN"):
        vitrail.train()


# On files


def test_a_damaged_image_is_left_out_by_name(digits, tmp_path, tiny, caplog):
    folder = shutil.copytree(digits, tmp_path / "data")
    damaged = next((folder / "3").iterdir())
    damaged.write_bytes(damaged.read_bytes()[:60])
    run = vitrail.train(folder, out=tmp_path, name="run", **tiny)
    assert f"1 of 240 images cannot be read and are left out: {damaged}" in caplog.text
    counts = re.search(r"(\d+) train, (\d+) val; multi-class, 10 classes", (run / "train.log").read_text())
    assert int(counts[1]) + int(counts[2]) == 239


def test_many_damaged_images_stop_the_run_before_it_begins(digits, tmp_path, tiny):
    folder = shutil.copytree(digits, tmp_path / "data")
    for path in sorted(folder.rglob("*.png"))[:240:20]:
        path.write_bytes(b"")
    with pytest.raises(UserError, match=r"12 of 240 images \(5\.0%\) cannot be read"):
        vitrail.train(folder, out=tmp_path / "runs", **tiny)
    assert not (tmp_path / "runs").exists()
