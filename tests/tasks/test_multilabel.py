"""Multi-label: what is measured, drawn and chosen."""

from __future__ import annotations

import json

import numpy as np
import pytest
from measuring import measure_labels
from PIL import Image
from sklearn.metrics import average_precision_score, f1_score, log_loss

from vitrail.charts.draw import save_charts
from vitrail.errors import UserError
from vitrail.tasks import Multilabel

ABC = ("a", "b", "c")
ANIMALS = Multilabel(("cat", "dog", "owl"), (0.5, 0.5, 0.3))


def noisy(images: int = 200, labels: int = 3) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    targets = (rng.random((images, labels)) < 0.3).astype(np.float32)
    return (3 * targets - 2 + rng.normal(size=targets.shape)).astype(np.float32), targets


def sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logits.astype(np.float64)))


def logit(chances: list[list[float]]) -> np.ndarray:
    return np.log(np.array(chances) / (1 - np.array(chances)))


# Scores


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
    assert Multilabel(ABC).charts(nothing) == []


def test_thresholds_that_were_measured_are_used_from_then_on():
    logits, targets = noisy()
    first = measure_labels(logits, targets, ABC)
    task = Multilabel(ABC).measured(first)
    assert task == Multilabel(ABC, tuple(s.threshold for s in first.per_label))
    again = task.measure(logits + 1, targets)
    assert [s.threshold for s in again.per_label] == list(task.thresholds)
    assert not again.chosen_here


def test_outputs_that_are_not_finite_are_refused():
    logits, targets = noisy(10)
    logits[3] = np.nan
    with pytest.raises(UserError, match="for 1 of 10 images"):
        measure_labels(logits, targets, ABC)


# Charts


@pytest.mark.parametrize("labels", [1, 12, 300])
def test_charts_of_labels_fit_a_screen(labels, tmp_path):
    logits, targets = noisy(100, labels)
    targets[0] = 1
    metrics = measure_labels(logits, targets, [f"label {k}" for k in range(labels)])
    save_charts(Multilabel(ABC).charts(metrics), tmp_path)
    assert {file.stem for file in tmp_path.iterdir()} == {"average_precision", "precision_recall", "reliability"}
    for file in tmp_path.iterdir():
        with Image.open(file) as image:
            assert 300 < image.width < 1500
            assert 200 < image.height < 4500


def test_charts_say_what_was_measured():
    logits, targets = noisy()
    metrics = measure_labels(logits, targets, ABC)
    bars, lines, reliability = Multilabel(ABC).charts(metrics)
    assert f"mean {metrics.map:.1%}" in bars.note
    assert f"macro F1 {metrics.macro_f1:.1%}" in lines.note
    assert [line.dot for line in lines.lines[:3]] == [pytest.approx((s.recall, s.precision)) for s in metrics.per_label]
    assert sum(count for *_, count in reliability.bins) == targets.size
    worst = min(metrics.per_label, key=lambda s: s.ap).name
    assert [line.name for line in lines.lines if line.tone == "warm"] == [f"{worst}, the weakest"]


# Single predictions


def test_labels_are_wrong_by_their_thresholds():
    outputs = np.array([[3.0, -3, -3], [3, -3, -0.5], [-6, -3, -3]])  # -0.5 is 38 %: above the threshold of the owl
    targets = np.array([[1, 0, 0], [1, 0, 0], [1, 0, 0]], np.float32)
    assert ANIMALS.right(outputs, targets).tolist() == [True, False, False]
    assert ANIMALS.worst(outputs, targets, 9).tolist() == [2, 1]
    assert ANIMALS.best(outputs, targets, 9).tolist() == [0]


def test_the_margin_is_the_distance_of_the_nearest_threshold():
    assert ANIMALS.margins(logit([[0.9, 0.1, 0.29], [0.6, 0.1, 0.9]])) == pytest.approx([0.01, 0.1])


def test_the_most_frequent_mistakes_are_labels_missed_or_wrongly_predicted():
    outputs = logit([[0.9, 0.1, 0.4], [0.9, 0.1, 0.9], [0.1, 0.1, 0.1], [0.8, 0.1, 0.1]])
    targets = np.array([[1, 0, 0], [1, 0, 0], [1, 0, 0], [1, 0, 0]], np.float32)
    found = ANIMALS.confused(outputs, targets, 5, 1)
    assert [(pair.true, pair.said, pair.count, pair.of, pair.numbers) for pair in found] == [
        ("not owl", "predicted", 2, 4, (1,)),
        ("cat", "missed", 1, 4, (2,)),
    ]
    assert ANIMALS.confused(outputs, targets, 1, 1) == found[:1]


def test_captions_have_labels_that_are_right_missed_and_wrong():
    lines = ANIMALS.caption(np.array([0.9, 0.2, 0.4]), np.array([1.0, 1, 0]))
    assert [line[:2] for line in lines] == [
        ("right: cat 90%", "plain"),
        ("missed: dog 20%", "wrong"),
        ("wrong: owl 40%", "wrong"),
    ]


def test_an_image_without_any_label_has_a_caption():
    lines = ANIMALS.caption(np.array([0.1, 0.2, 0.1]), np.zeros(3))
    assert [text for text, *_ in lines] == ["right: (no label)"]
    assert ANIMALS.said(np.array([0.1, 0.2, 0.1]), np.zeros(3)) == ("(none)", "(none)")
