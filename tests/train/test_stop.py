"""Which epoch is kept, early stopping, and longer training of a finished run."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from measuring import measure
from sklearn.metrics import balanced_accuracy_score, f1_score

import vitrail
from vitrail.config import OptimConfig, StopConfig
from vitrail.errors import UserError
from vitrail.runs.run import Run
from vitrail.train.config_file import with_file
from vitrail.train.progress import Progress
from vitrail.train.resolve import typed
from vitrail.train.schedule import Schedule

pytestmark = pytest.mark.usefixtures("plain_runs")


def imbalanced(images: int = 400, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Logits and labels of four classes, one of them rare and one without images."""
    random = np.random.default_rng(seed)
    labels = random.choice(4, images, p=[0.6, 0.35, 0.05, 0.0])
    return random.normal(size=(images, 4)) + 1.5 * np.eye(4)[labels], labels


def test_macro_f1_and_balanced_accuracy_are_those_of_scikit_learn():
    logits, labels = imbalanced()
    scores, said, there = measure(logits, labels, tuple("abcd")), logits.argmax(axis=1), np.unique(labels)
    assert scores.macro_f1 == pytest.approx(f1_score(labels, said, average="macro", labels=there))
    assert scores.balanced_accuracy == pytest.approx(np.mean([(said[labels == k] == k).mean() for k in there]))
    everyone = logits[:, :3], labels
    assert measure(*everyone, tuple("abc")).balanced_accuracy == pytest.approx(
        balanced_accuracy_score(labels, everyone[0].argmax(axis=1))
    )


@pytest.mark.parametrize("best", ["top1", "f1", "balanced", "loss"])
def test_standard_errors_are_those_of_resampled_images(best):
    logits, labels = imbalanced()
    _, error = measure(logits, labels, tuple("abcd")).by(best)
    random, samples = np.random.default_rng(1), []
    for _ in range(300):
        chosen = random.integers(0, len(labels), len(labels))
        samples.append(measure(logits[chosen], labels[chosen], tuple("abcd")).by(best)[0])
    assert error == pytest.approx(np.std(samples), rel=0.2)


def test_the_run_keeps_the_epoch_that_best_names_and_says_so(tiny, tmp_path, caplog):
    caplog.set_level("INFO", "vitrail")
    run = vitrail.train("digits", out=tmp_path, name="run", best="f1", **tiny)
    assert "macro F1" in next(line for line in caplog.messages if line.startswith("Kept epoch"))
    row = Run(run).history[0]
    assert 0 < row["val_macro_f1"] <= 1
    assert 0 < row["val_balanced_accuracy"] <= 1
    assert Run(run).config.stop.best == "f1"
    with pytest.raises(UserError, match=r"--best map does not apply to multi-class data. Choose one of top1, f1"):
        vitrail.train("digits", out=tmp_path, best="map", **tiny)


def test_patience_stops_a_run_that_no_longer_improves(tiny, tmp_path, caplog):
    caplog.set_level("INFO", "vitrail")
    settings = tiny | {"epochs": 9, "lr": 1e-20, "warmup_epochs": 0, "val_fraction": 0.9}
    run = Run(vitrail.train("digits", out=tmp_path, name="run", best="loss", patience=2, **settings))
    assert len(run.history) == 3  # the first is the best
    assert f"Stopped after epoch {len(run.history)}: loss has not improved for 2 epochs." in caplog.messages
    assert run.finished
    assert not run.used_up
    before = run.metrics_file.read_text()
    vitrail.train(resume=run.path)  # there is nothing left to do
    assert run.metrics_file.read_text() == before


def test_progress_counts_epochs_without_a_better_score():
    progress = Progress(rows=[{}] * 7, leader=4)
    assert [patience for patience in range(5) if progress.stalled(patience)] == [1, 2, 3]
    assert not progress.stalled(3, since=5)  # an extension has as much patience as a new run


def test_a_finished_run_is_extended_with_a_decay_of_its_own(tiny, tmp_path, caplog):
    caplog.set_level("INFO", "vitrail")
    how = tiny | {"warmup_epochs": 0, "sched": "linear", "lr": 0.002}
    run = Run(vitrail.train("digits", out=tmp_path, name="run", **how))
    first = run.history
    with pytest.raises(UserError, match=r"already has 1 epochs. Give more: --epochs 2"):
        vitrail.train(resume=run.path, epochs=0.5)
    vitrail.train(resume=run.path, epochs=3)
    longer = Run(run.path)
    assert any("from 1 to 3 epochs: the learning rate warms up to 0.002 and decays anew" in m for m in caplog.messages)
    assert longer.config.optim.epochs == 3
    assert longer.config.stop.restarts == (1.0,)
    assert longer.history[:1] == first
    rates = [row["lr"] for row in longer.history]
    assert rates[1] > rates[0]  # the last step of the second epoch is in the middle of the new decay
    assert rates[2] < rates[1]
    assert longer.finished
    whole = vitrail.train("digits", out=tmp_path, name="whole", **how | {"epochs": 3, "restarts": [1]})
    names = ("lr", "train_loss", "val_loss")
    last, planned = ([run.history[-1][name] for name in names] for run in (longer, Run(whole)))
    assert last == planned  # as if it had been planned so


def test_an_unfinished_run_is_not_extended(trained, tmp_path):
    run = Run(shutil.copytree(trained, tmp_path / "run"))
    run.config_file.write_text(run.config_file.read_text().replace("epochs: 2.0", "epochs: 4.0", 1))
    assert not run.finished
    with pytest.raises(UserError, match=r"epochs 9 instead of 4.* A finished run can be extended with more --epochs."):
        vitrail.train(resume=run.path, epochs=9)


def test_the_learning_rate_of_every_decay():
    optim = OptimConfig(epochs=30, batch_size=1, opt="adamw", lr=1.0, weight_decay=0.0, sched="linear", warmup_epochs=2)
    schedule = Schedule(optim, 10, 0.0, StopConfig(restarts=(10.0, 20.0)))
    rates = [schedule.lr(Progress(step=step)) for step in range(300)]
    assert rates[0] == pytest.approx(0.05)  # 20 steps of warm-up
    assert rates[20] == rates[110] == rates[210] == 1.0  # a tenth of an extension
    assert rates[99] < 0.02
    assert rates[199] < 0.02
    assert rates[299] < 0.02


def test_a_run_counts_past_its_planned_epochs_only_by_time():
    optim = OptimConfig(epochs=5, batch_size=1, opt="sgd", lr=1.0, weight_decay=0.0, sched="linear", warmup_epochs=0)
    assert Schedule(optim, 10, 0.0).title(5) == "5"
    timed = OptimConfig(**{**vars(optim), "time_budget": 60.0})
    assert [Schedule(timed, 10, 0.0).title(epoch) for epoch in (5, 6)] == ["~5", "~6"]


def test_settings_from_a_file_are_overridden_by_flags(trained, tmp_path):
    run = Run(vitrail.train(config=trained / "config.yaml", out=tmp_path / "runs", epochs=1, seed=3))
    saved, own = Run(trained).config, run.config
    assert run.name == "trained"
    assert (own.optim.epochs, own.run.seed) == (1, 3)
    assert (own.model, own.data, own.input, own.augment) == (saved.model, saved.data, saved.input, saved.augment)
    source, settings = with_file(trained / "config.yaml", None, None, {"out": str(tmp_path / "runs")})
    assert (source, settings["name"]) == ("digits", "trained-2")  # nothing is replaced


def test_a_file_may_have_the_names_of_flags(tmp_path):
    file = tmp_path / "flat.yaml"
    file.write_text("data: photos\nimg-size: 8\ntime_budget: 10m\nepochs: 3\namp: off\n")
    assert with_file(file, None, None, {"lr": 1.0}) == (
        "photos",
        {"img_size": 8, "time_budget": "10m", "amp": False, "lr": 1.0},
    )
    assert with_file(file, "digits", None, {"epochs": 5.0})[1] == {"img_size": 8, "amp": False, "epochs": 5.0}
    assert typed({"amp": False, "device": 0}) == {"amp": "off", "device": "cuda:0"}
    assert typed({"amp": True}) == {}
    file.write_text("learning_rate: 3\n")
    with pytest.raises(UserError, match=r"flat.yaml: There is no setting 'learning_rate'. It is called 'lr' here."):
        vitrail.train("digits", config=file)
    with pytest.raises(UserError, match="cannot be read: No such file"):
        vitrail.train("digits", config=Path("nowhere.yaml"))
    with pytest.raises(UserError, match="Remove --config"):
        vitrail.train(resume=tmp_path, config=file)
