"""Intervals are those of measuring again what was drawn."""

from __future__ import annotations

import numpy as np
import pytest
from measuring import measure, measure_labels, measure_values

from vitrail.tasks import Multiclass, Multilabel, Regression
from vitrail.tasks.bootstrap import SAMPLES, Samples, difference
from vitrail.tasks.scores import Scores

IMAGES, CLASSES = 60, ("a", "b", "c", "d", "e", "f")
TASK = Multiclass(CLASSES)


def drawn(images: int = IMAGES) -> np.ndarray:
    """The images of every sample, (R, N): few enough to be drawn at once."""
    return np.random.default_rng(0).integers(0, images, (SAMPLES, images))


def classes(seed: int = 1, images: int = IMAGES) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    labels = np.arange(images) % len(CLASSES)
    logits = random.normal(size=(images, len(CLASSES))).astype(np.float32)
    logits[np.arange(images), labels] += 1
    return logits, labels


def check(samples: Samples, again: list[Scores], scores: str) -> None:
    """The first samples are what measuring the drawn images gives."""
    for name, values in samples.whole.items():
        assert values.shape == (SAMPLES,)
        np.testing.assert_allclose(values[: len(again)], [getattr(m, name) for m in again], err_msg=name, rtol=1e-6)
    for name, values in samples.each.items():
        expected = [[getattr(score, name) or 0.0 for score in getattr(m, scores)] for m in again]
        np.testing.assert_allclose(values[: len(again)], expected, err_msg=name, rtol=1e-6)


def test_of_classes():
    logits, labels = classes()
    samples = TASK.sample(measure(logits, labels, CLASSES), logits, labels)
    check(samples, [measure(logits[rows], labels[rows], CLASSES) for rows in drawn()[:20]], "per_class")
    assert samples.whole.keys() == {"top1", "top5", "loss", "ece", "macro_f1", "balanced_accuracy"}


def test_of_labels():
    random = np.random.default_rng(2)
    targets = (random.random((IMAGES, 4)) < 0.3).astype(np.float32)
    logits = np.round(random.normal(size=(IMAGES, 4)) + targets, 1)  # some are alike
    metrics = measure_labels(logits, targets, "abcd")
    thresholds = [score.threshold for score in metrics.per_label]
    again = [measure_labels(logits[rows], targets[rows], "abcd", thresholds) for rows in drawn()[:20]]
    check(Multilabel(tuple("abcd")).sample(metrics, logits, targets), again, "per_label")


def test_of_numbers():
    random = np.random.default_rng(3)
    targets = random.normal(1000, 2, size=(IMAGES, 2))
    outputs = (targets - 1000) / 2 + random.normal(0, 0.3, size=(IMAGES, 2))
    scale = {"mean": (1000.0, 1000.0), "std": (2.0, 2.0)}
    again = [measure_values(outputs[rows], targets[rows], "xy", **scale) for rows in drawn()[:20]]
    task = Regression(("x", "y"), scale["mean"], scale["std"])
    check(task.sample(task.measure(outputs, targets), outputs, targets), again, "per_value")


def test_many_images_are_drawn_some_samples_at_a_time(monkeypatch):
    logits, labels = classes()
    metrics = measure(logits, labels, CLASSES)
    at_once = TASK.sample(metrics, logits, labels)
    monkeypatch.setattr("vitrail.tasks.bootstrap._AT_ONCE", 7 * IMAGES)
    parts = TASK.sample(metrics, logits, labels)
    for name, values in parts.whole.items():
        np.testing.assert_allclose(values, at_once.whole[name])


def test_an_interval_holds_95_percent_and_narrows_with_more_images():
    widths = []
    for images in (60, 600, 6000):
        logits, labels = classes(images=images)
        metrics = measure(logits, labels, CLASSES)
        low, high = TASK.sample(metrics, logits, labels).interval("top1")
        assert low < metrics.top1 < high
        normal = 1.96 * np.sqrt(metrics.top1 * (1 - metrics.top1) / images)
        assert high - low == pytest.approx(2 * normal, rel=0.15)
        widths.append(high - low)
    assert widths == sorted(widths, reverse=True)


def test_a_confusion_matrix_tells_as_much_as_the_images_where_it_can():
    logits, labels = classes(images=2000)
    metrics = measure(logits, labels, CLASSES)
    whole, kept = TASK.sample(metrics, logits, labels), TASK.sample(metrics, None, None)
    assert kept.whole.keys() == {"top1", "macro_f1", "balanced_accuracy"}
    np.testing.assert_allclose(kept.interval("top1"), whole.interval("top1"), atol=0.003)
    np.testing.assert_allclose(kept.intervals("f1"), whole.intervals("f1"), atol=0.02)
    assert kept.interval("loss") is None
    labelled = measure_labels(logits, np.eye(6)[labels], CLASSES)
    assert Multilabel(CLASSES).sample(labelled, None, None).intervals("ap") is None


def test_models_on_the_same_images_differ_by_less_than_their_intervals_overlap():
    logits, labels = classes(images=1000)
    better = logits.copy()
    better[np.arange(40), labels[:40]] += 9
    one, other = (TASK.sample(measure(x, labels, CLASSES), x, labels) for x in (logits, better))
    assert difference(one, one, "top1") == (0, 0)
    low, high = difference(one, other, "top1")
    assert 0 < low < high
    assert one.interval("top1")[1] > other.interval("top1")[0]
    assert difference(one, Samples(), "top1") is None
