"""Several labels and numbers: what is measured, drawn and predicted."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import average_precision_score, f1_score, log_loss, mean_absolute_error, r2_score
from vitrail.evaluate.charts import charts_of
from vitrail.evaluate.metrics import measure_labels, measure_model, measure_values, measured

from vitrail.charts.draw import save_charts
from vitrail.data.images import read_image
from vitrail.data.preprocess import Preprocess
from vitrail.errors import UserError
from vitrail.evaluate.predict import write
from vitrail.models import create
from vitrail.runs.predictor import Prediction
from vitrail.verbs.predict import predict
from vitrail.weights import Card, open_card, save

ABC = ("a", "b", "c")


def noisy(images: int = 200, labels: int = 3) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    targets = (rng.random((images, labels)) < 0.3).astype(np.float32)
    return (3 * targets - 2 + rng.normal(size=targets.shape)).astype(np.float32), targets


def sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logits.astype(np.float64)))


# Multi-label


def test_numbers_of_labels_equal_those_of_scikit_learn():
    logits, targets = noisy()
    metrics = measure_labels(logits, targets, ABC, [0.3, 0.4, 0.5])
    chances = sigmoid(logits)
    said = chances >= [0.3, 0.4, 0.5]
    assert metrics.map == metrics.main == pytest.approx(average_precision_score(targets, chances, average="macro"))
    assert metrics.macro_f1 == pytest.approx(f1_score(targets, said, average="macro"))
    assert metrics.micro_f1 == pytest.approx(f1_score(targets, said, average="micro"))
    losses = [log_loss(targets[:, k], chances[:, k]) for k in range(3)]
    assert metrics.loss == pytest.approx(np.mean(losses))
    assert [s.f1 for s in metrics.per_label] == pytest.approx(f1_score(targets, said, average=None).tolist())
    assert [s.support for s in metrics.per_label] == targets.sum(0).tolist()
    assert not metrics.chosen_here


def test_thresholds_are_those_with_the_best_f1():
    logits, targets = noisy()
    metrics = measure_labels(logits, targets, ABC)
    chances = sigmoid(logits)
    for k, score in enumerate(metrics.per_label):
        best = max(f1_score(targets[:, k], chances[:, k] >= at) for at in chances[:, k])
        assert score.f1 == pytest.approx(best)
        assert score.threshold not in chances[:, k]  # it lies in a gap, so that rounding cannot change what is said
    assert metrics.chosen_here


def test_labels_that_no_image_has_are_left_out_of_the_means_and_said():
    logits, targets = noisy()
    targets[:, 1] = 0
    metrics = measure_labels(logits, targets, ABC)
    chances = sigmoid(logits)
    kept = [average_precision_score(targets[:, k], chances[:, k]) for k in (0, 2)]
    assert metrics.map == pytest.approx(np.mean(kept))
    assert (metrics.unseen, metrics.per_label[1].ap, metrics.per_label[1].threshold) == (["b"], None, 0.5)
    assert "No image here has b: left out" in metrics.table()
    json.dumps(metrics.to_json())
    nothing = measure_labels(logits, targets * 0, ABC)
    assert (nothing.map, nothing.macro_f1) == (0, 0)
    assert charts_of(nothing) == []


def test_a_measured_card_keeps_the_thresholds_and_uses_them_from_then_on():
    logits, targets = noisy()
    card = Card(model="m", config=create("vit_nano2").config, classes=ABC, preprocess=Preprocess((8, 8), 1))
    card = Card(**{**vars(card), "task": "multilabel"})
    first = measure_model(card, logits, targets)
    kept = measured(card, first, epoch=3)
    assert kept.thresholds == tuple(s.threshold for s in first.per_label)
    assert kept.metrics["map"] == round(first.map, 6)
    again = measure_model(kept, logits + 1, targets)
    assert [s.threshold for s in again.per_label] == list(kept.thresholds)


# Regression


def test_numbers_are_measured_in_their_own_units():
    rng = np.random.default_rng(0)
    true = rng.normal(size=(100, 2)) * [5, 0.1] + [100, 3]
    outputs = (true - [100, 3]) / [5, 0.1] + rng.normal(size=true.shape) * 0.3
    metrics = measure_values(outputs, true, ("x", "y"), (100, 3), (5, 0.1))
    said = outputs * [5, 0.1] + [100, 3]
    for k, score in enumerate(metrics.per_value):
        assert score.mae == pytest.approx(mean_absolute_error(true[:, k], said[:, k]))
        assert score.rmse == pytest.approx(np.sqrt(((true - said)[:, k] ** 2).mean()))
        assert score.r2 == pytest.approx(r2_score(true[:, k], said[:, k]))
    assert metrics.r2 == metrics.main == pytest.approx(np.mean([s.r2 for s in metrics.per_value]))
    assert metrics.loss == pytest.approx((((true - said) / [5, 0.1]) ** 2).mean())
    assert "mean" in metrics.table()


def test_values_that_are_all_alike_have_no_r2_to_speak_of():
    metrics = measure_values(np.ones((3, 1)), np.full((3, 1), 7.0), ("x",), (6,), (1,))
    assert (metrics.r2, metrics.mae) == (0, 0)


@pytest.mark.parametrize("measuring", [measure_labels, lambda *a: measure_values(*a, (0,) * 3, (1,) * 3)])
def test_outputs_that_are_not_finite_are_refused(measuring):
    logits, targets = noisy(10)
    logits[3] = np.nan
    with pytest.raises(UserError, match="for 1 of 10 images"):
        measuring(logits, targets, ABC)


# Charts


@pytest.mark.parametrize("labels", [1, 12, 300])
def test_charts_of_labels_fit_a_screen(labels, tmp_path):
    logits, targets = noisy(100, labels)
    targets[0] = 1
    metrics = measure_labels(logits, targets, [f"label {k}" for k in range(labels)])
    save_charts(charts_of(metrics), tmp_path)
    assert {file.stem for file in tmp_path.iterdir()} == {"average_precision", "precision_recall", "reliability"}
    for file in tmp_path.iterdir():
        with Image.open(file) as image:
            assert 300 < image.width < 1500
            assert 200 < image.height < 4500


def test_charts_say_what_was_measured():
    logits, targets = noisy()
    metrics = measure_labels(logits, targets, ABC)
    bars, lines, reliability = charts_of(metrics)
    assert f"mean {metrics.map:.1%}" in bars.note
    assert f"macro F1 {metrics.macro_f1:.1%}" in lines.note
    assert [line.dot for line in lines.lines[:3]] == [pytest.approx((s.recall, s.precision)) for s in metrics.per_label]
    assert sum(count for *_, count in reliability.bins) == targets.size
    worst = min(metrics.per_label, key=lambda s: s.ap).name
    assert [line.name for line in lines.lines if line.tone == "warm"] == [f"{worst}, the weakest"]


# Predictions


def make_run(folder: Path, **card) -> Path:
    torch.manual_seed(0)
    model = create("vit_nano2", img_size=8, channels=1, classes=3, depth=1).eval()
    torch.nn.init.normal_(model.head.weight)
    preprocess = Preprocess((8, 8), 1)
    save(
        folder / "model.safetensors",
        model,
        Card(model="vit_nano2", config=model.config, classes=ABC, preprocess=preprocess, **card),
    )
    image = np.random.default_rng(0).integers(0, 256, (8, 8), np.uint8)
    Image.fromarray(image).save(folder / "image.png")
    return folder


def outputs(folder: Path) -> list[float]:
    from vitrail.weights import open_run

    model, card = open_run(folder)
    with torch.no_grad():
        return model(card.preprocess(read_image(folder / "image.png"))[None])[0].tolist()


def test_all_labels_above_their_thresholds_are_told(tmp_path):
    run = make_run(tmp_path, task="multilabel", thresholds=(0.5, 0.5, 0.5))
    chances = sigmoid(np.array(outputs(run)))
    limits = chances[0] + 1e-4, chances[1] - 1e-4, chances[2] - 1e-4  # missed, reached, reached
    make_run(tmp_path, task="multilabel", thresholds=limits)
    (prediction,) = predict(run, [run / "image.png"])
    expected = sorted([(chances[1], "b"), (chances[2], "c")], reverse=True)
    assert prediction.labels == tuple(name for _, name in expected)
    assert prediction.probabilities == pytest.approx([chance for chance, _ in expected], abs=1e-5)
    (prediction,) = predict(run, [run / "image.png"], top=1)
    assert prediction.labels == (expected[0][1],)


def test_numbers_are_told_in_their_own_units(tmp_path):
    run = make_run(tmp_path, task="regression", target_mean=(10, 20, 30), target_std=(1, 2, 3))
    (prediction,) = predict(run, [run / "image.png"])
    assert prediction.labels == ABC
    assert prediction.values == pytest.approx(
        [mean + std * out for mean, std, out in zip((10, 20, 30), (1, 2, 3), outputs(run), strict=True)], rel=1e-5
    )


def written(predictions, format) -> str:
    stream = io.StringIO()
    write(predictions, format, stream)
    return stream.getvalue()


def test_labels_are_written_as_a_table_that_can_be_read_back():
    predictions = [
        Prediction("0.png", error="empty file", task="multilabel"),
        Prediction("1.png", task="multilabel"),
        Prediction("2.png", ("a", "b"), (0.75, 0.5), task="multilabel"),
    ]
    rows = list(csv.DictReader(io.StringIO(written(predictions, "csv"))))
    assert [row["labels"] for row in rows] == ["", "", "a|b"]
    assert [row["error"] for row in rows] == ["empty file", "", ""]
    assert rows[2]["probabilities"] == "0.750000|0.500000"
    assert json.loads(written(predictions, "json").splitlines()[2])["labels"] == ["a", "b"]
    assert written(predictions, "table").splitlines()[1:] == ["1.png  (no label)", "2.png  a   75.0%  b 50.0%"]


def test_numbers_are_written_in_columns_of_their_names():
    predictions = [
        Prediction("0.png", error="empty file", task="regression"),
        Prediction("1.png", ("x", "y"), values=(1.25, -3.0), task="regression"),
    ]
    assert written(predictions, "csv") == "file,x,y,error\n0.png,,,empty file\n1.png,1.25,-3,\n"
    assert [json.loads(line) for line in written(predictions, "json").splitlines()] == [
        {"file": "0.png", "values": {}, "error": "empty file"},
        {"file": "1.png", "values": {"x": 1.25, "y": -3.0}, "error": None},
    ]
    assert written(predictions, "table").splitlines()[1] == "1.png  x 1.25  y -3"


# Cards


def test_an_older_card_is_multi_class_and_a_wrong_one_is_refused(tmp_path):
    path = make_run(tmp_path) / "model.json"
    document = json.loads(path.read_text())
    for name in ("task", "thresholds", "target_mean", "target_std"):
        del document[name]
    path.write_text(json.dumps(document))
    assert open_card(tmp_path).task == "multiclass"
    for change, message in (
        ({"task": "segment"}, "'task' must be one of"),
        ({"task": "multilabel", "thresholds": [0.5]}, "'thresholds' must have one number for each of 3 labels"),
        ({"task": "regression"}, "not a vitrail model card"),
    ):
        path.write_text(json.dumps(document | change))
        with pytest.raises(UserError, match=message):
            open_card(tmp_path)
