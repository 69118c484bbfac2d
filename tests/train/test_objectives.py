"""Runs on labels, numbers and uneven classes: what is augmented, kept, measured and resumed."""

from __future__ import annotations

import csv
import json
import logging
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

import vitrail
from vitrail.config import AugmentConfig, TrainConfig, load_yaml
from vitrail.data.augment import augment
from vitrail.errors import UserError
from vitrail.weights import open_card

pytestmark = pytest.mark.usefixtures("plain_runs")


@pytest.fixture(scope="module")
def table(digits, tmp_path_factory):
    """Digits with what can be said of them: a list of labels, and two numbers of very different size."""
    path = tmp_path_factory.mktemp("table") / "facts.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "labels", "ink", "weight"])
        for image in sorted(digits.glob("*/*.png")):
            digit = int(image.parent.name)
            labels = [name for name, those in {"even": (0, 2, 4, 6, 8), "loop": (0, 6, 8, 9)}.items() if digit in those]
            ink = np.asarray(Image.open(image)).mean()
            writer.writerow([image, "|".join(labels), f"{ink:.3f}", f"{ink * 1e-4 + 5:.8f}"])
    return path


@pytest.fixture(scope="module")
def labels_run(table, tmp_path_factory, small):
    return vitrail.train(table, out=tmp_path_factory.mktemp("labels"), name="run", **(small | {"epochs": 4}))


@pytest.fixture(scope="module")
def numbers(small):
    return small | {"epochs": 8, "batch_size": 16, "lr": 0.01, "label_column": ["ink", "weight"]}


@pytest.fixture(scope="module")
def numbers_run(table, tmp_path_factory, numbers):
    return vitrail.train(table, out=tmp_path_factory.mktemp("numbers"), name="run", **numbers)


def rows(run: Path) -> list[dict[str, float]]:
    with (run / "metrics.csv").open(newline="") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def test_a_run_on_labels_is_measured_by_them(labels_run, table):
    config, card = load_yaml(TrainConfig, labels_run / "config.yaml"), open_card(labels_run)
    assert config.source.task == card.task.name == "multilabel"
    assert card.classes == ("even", "loop")
    assert len(card.task.thresholds) == 2
    epochs = rows(labels_run)
    columns = ["epoch", "step", "lr", "train_loss", "val_loss", "val_map", "val_macro_f1", "val_micro_f1", "seconds"]
    assert list(epochs[0]) == [*columns, "wait"]
    metrics, kept = vitrail.evaluate(labels_run), epochs[card.metrics["epoch"] - 1]
    assert metrics.map == pytest.approx(kept["val_map"], abs=1e-6)
    assert kept["val_map"] >= max(row["val_map"] for row in epochs) - 2 * metrics.standard_error
    assert metrics.map > 0.6  # by chance 0.45
    assert metrics.folder is not None
    assert {path.name for path in metrics.folder.iterdir()} == {
        "metrics.json",
        "outputs.npz",
        "per_label.csv",
    }
    assert vitrail.evaluate(labels_run, table).loss == metrics.loss


def test_a_run_on_numbers_is_measured_in_their_units(numbers_run, table):
    config, card = load_yaml(TrainConfig, numbers_run / "config.yaml"), open_card(numbers_run)
    assert config.source.task == card.task.name == "regression"
    assert config.source.label_column == card.classes == ("ink", "weight")
    assert config.augment == AugmentConfig()  # whatever moves or blends an image could change the numbers
    assert 20 < card.task.target_mean[0] < 200
    assert card.task.target_mean[1] == pytest.approx(5 + card.task.target_mean[0] * 1e-4, rel=1e-4)
    assert card.task.target_std[0] > 1000 * card.task.target_std[1]
    assert list(rows(numbers_run)[0])[4:-2] == ["val_loss", "val_mae", "val_rmse", "val_r2"]
    metrics = vitrail.evaluate(numbers_run)
    assert metrics.r2 > 0.5
    assert all(score.r2 > 0.5 for score in metrics.per_value)
    assert metrics.per_value[0].mae < card.task.target_std[0]
    assert metrics.r2 == pytest.approx(max(row["val_r2"] for row in rows(numbers_run)))

    with table.open() as file:
        truth = list(csv.DictReader(file))
    said = list(vitrail.predict(numbers_run, [row["image"] for row in truth]))
    errors = [abs(p.values[0] - float(row["ink"])) for p, row in zip(said, truth, strict=True)]
    assert np.mean(errors) < card.task.target_std[0]


@pytest.mark.parametrize("kind", ["labels", "numbers"])
def test_a_run_that_was_stopped_ends_as_if_it_had_not_been(kind, request, table, tmp_path, small, numbers):
    straight = request.getfixturevalue(f"{kind}_run")

    class Stop(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith("epoch 2/"):
                os.kill(os.getpid(), signal.SIGINT)

    settings = numbers if kind == "numbers" else small | {"epochs": 4}
    handler = Stop()
    log = logging.getLogger("vitrail")
    log.addHandler(handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            vitrail.train(table, out=tmp_path, name="run", **settings)
    finally:
        log.removeHandler(handler)
    assert len(rows(tmp_path / "run")) == 2
    run = vitrail.train(resume=tmp_path / "run")
    assert (run / "model.safetensors").read_bytes() == (straight / "model.safetensors").read_bytes()
    assert json.loads((run / "model.json").read_text()) == json.loads((straight / "model.json").read_text())


def test_weights_of_another_task_get_a_new_head_and_that_is_said(labels_run, table, tmp_path, numbers, caplog):
    settings = numbers | {"weights": labels_run, "epochs": 1}
    with caplog.at_level(logging.INFO, "vitrail"):
        vitrail.train(table, out=tmp_path, **settings)
    assert "new head for 2 values instead of labels" in caplog.text


def test_data_of_another_task_is_refused(labels_run):
    with pytest.raises(UserError, match="is multi-class data, so the task cannot be multi-label"):
        vitrail.evaluate(labels_run, "digits")


def test_smoothing_of_numbers_is_refused(table, tmp_path, numbers):
    with pytest.raises(UserError, match=r"--smoothing needs classes or labels, but .* has values"):
        vitrail.train(table, out=tmp_path, smoothing=0.1, **numbers)
    assert list(tmp_path.iterdir()) == []


def augmented(targets: torch.Tensor, **settings) -> tuple[torch.Tensor, torch.Tensor]:
    pixels = torch.arange(len(targets), dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 8, 8) * 10
    generator = torch.Generator().manual_seed(0)
    return augment(pixels, targets, AugmentConfig(**settings), torch.Tensor.float, targets.shape[1], generator)


def test_labels_and_numbers_are_mixed_as_the_images_are():
    targets = torch.arange(8).float()[:, None] * torch.tensor([10.0, -2.0])
    for settings in ({"mixup": 1.0}, {"cutmix": 1.0}):
        images, mixed = augmented(targets, **settings)
        assert not torch.equal(mixed, targets)
        torch.testing.assert_close(images.mean((1, 2, 3)), mixed[:, 0], rtol=0, atol=1e-3)
        torch.testing.assert_close(mixed[:, 1], mixed[:, 0] / -5)
    torch.testing.assert_close(augmented(targets)[1], targets)


def test_a_smoothed_label_is_a_little_of_both():
    _, smoothed = augmented(torch.eye(4), smoothing=0.1)
    torch.testing.assert_close(smoothed, torch.eye(4) * 0.9 + 0.05)


def test_labels_and_numbers_are_checked_before_they_are_learnt(table, labels_run, tmp_path):
    audit = vitrail.check(table, out=tmp_path)
    with table.open() as file:
        labels = [row["labels"] for row in csv.DictReader(file)]
    assert {name: sum(counts.values()) for name, counts in audit.counts.items()} == {
        "(none)": sum(not label for label in labels),
        "even": sum("even" in label for label in labels),
        "loop": sum("loop" in label for label in labels),
    }
    numbers = vitrail.check(table, label_column=["ink", "weight"], out=tmp_path)
    assert {sum(counts.values()) for counts in numbers.counts.values()} == {len(labels)}
    assert not audit.errors
    assert not numbers.errors
    with pytest.raises(UserError, match="needs a model with one class per image"):
        vitrail.check(table, run=labels_run, out=tmp_path)


# Uneven classes

RARE = "3"


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    """Digits, of one of which train has five images only."""
    images, labels = load_digits(return_X_y=True)
    pixels = (images.reshape(-1, 8, 8) * 15).astype(np.uint8)
    train = np.concatenate([np.flatnonzero(labels[:800] == c)[: 5 if str(c) == RARE else None] for c in range(10)])
    path = tmp_path_factory.mktemp("data") / "uneven.npz"
    np.savez(path, x_train=pixels[train], y_train=labels[train], x_val=pixels[1000:1300], y_val=labels[1000:1300])
    return path


@pytest.fixture(scope="module")
def train(uneven, tiny, tmp_path_factory):
    """Trains on them for a few seconds, and returns the recall of every class and the log."""

    def run(**settings):
        out = tmp_path_factory.mktemp("runs")
        run = vitrail.train(uneven, out=out, **{**tiny, "epochs": 4}, **settings)
        metrics = json.loads((run / "evaluation/uneven-val/metrics.json").read_text())
        return {score["name"]: score["recall"] for score in metrics["per_class"]}, (run / "train.log").read_text()

    return run


@pytest.fixture(scope="module")
def plain(train):
    return train()


@pytest.mark.parametrize("setting", ["class_weights", "balanced_sampling"])
def test_the_rare_class_is_recognised_more_often(train, plain, setting):
    recall, said = train(**{setting: True})
    assert recall[RARE] > plain[0][RARE] + 0.2
    assert np.mean(list(recall.values())) > np.mean(list(plain[0].values()))
    assert "times as many images" not in said


def test_a_run_on_uneven_classes_says_what_to_do(plain, trained):
    assert f"times as many images as '{RARE}' (" in plain[1]
    assert "try --balanced-sampling" in plain[1]
    assert "--balanced-sampling" not in (trained / "train.log").read_text()


def test_one_way_is_enough(uneven):
    with pytest.raises(UserError, match="Choose one"):
        vitrail.train(uneven, class_weights=True, balanced_sampling=True)
