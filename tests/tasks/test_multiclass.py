from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from measuring import measure
from sklearn.metrics import classification_report, log_loss, top_k_accuracy_score

from vitrail.errors import UserError
from vitrail.tasks import Multiclass
from vitrail.tasks.calibration import BINS

ABC = ["a", "b", "c"]
ANIMALS = Multiclass(("cat", "dog", "owl"))


def noisy(images: int, classes: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    labels = random.integers(0, classes, images)
    logits = random.normal(size=(images, classes)).astype(np.float32)
    logits[np.arange(images), labels] += 1.5
    return logits, labels


def certain(labels: np.ndarray, confidence: np.ndarray) -> np.ndarray:
    """Logits of two classes that predict `labels` with the given probabilities."""
    logits = np.zeros((len(labels), 2))
    logits[np.arange(len(labels)), labels] = np.log(confidence / (1 - confidence))
    return logits


def test_numbers_computed_by_hand():
    logits = np.log([[0.7, 0.2, 0.1], [0.6, 0.3, 0.1], [0.1, 0.8, 0.1], [0.25, 0.25, 0.5]])
    metrics = measure(logits, np.array([0, 1, 1, 2]), ABC)
    assert metrics.images == 4
    assert metrics.top1 == 0.75
    assert metrics.loss == pytest.approx(-np.log([0.7, 0.3, 0.8, 0.5]).mean())
    assert metrics.confusion.tolist() == [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    a, b, c = metrics.per_class
    assert (a.name, a.precision, a.recall, a.support) == ("a", 0.5, 1.0, 1)
    assert (b.name, b.precision, b.recall, b.support) == ("b", 1.0, 0.5, 2)
    assert (a.f1, b.f1, c.f1) == pytest.approx((2 / 3, 2 / 3, 1.0))
    # confidences 0.7, 0.6, 0.8, 0.5 fall into four bins; only the second prediction is wrong
    assert metrics.ece == pytest.approx((0.3 + 0.6 + 0.2 + 0.5) / 4)


def test_numbers_equal_those_of_scikit_learn():
    logits, labels = noisy(500, 12)
    classes = [f"class {i}" for i in range(12)]
    metrics = measure(logits, labels, classes)
    exp = np.exp(logits.astype(np.float64))
    probabilities = exp / exp.sum(axis=1, keepdims=True)
    assert metrics.top1 == pytest.approx(top_k_accuracy_score(labels, logits, k=1))
    assert metrics.top5 == pytest.approx(top_k_accuracy_score(labels, logits, k=5))
    assert metrics.loss == pytest.approx(log_loss(labels, probabilities))
    report = classification_report(labels, logits.argmax(1), target_names=classes, output_dict=True)
    for score in metrics.per_class:
        expected = report[score.name]
        assert score.precision == pytest.approx(expected["precision"])
        assert score.recall == pytest.approx(expected["recall"])
        assert score.f1 == pytest.approx(expected["f1-score"])
        assert score.support == expected["support"]


def test_top5_of_three_classes_counts_all_three():
    logits, labels = noisy(50, 3)
    metrics = measure(logits, labels, ABC)
    assert metrics.top1 < metrics.top5 == 1.0


def test_equal_logits_are_one_prediction_and_not_a_hit_for_everybody():
    metrics = measure(np.zeros((12, 12)), np.arange(12), [str(i) for i in range(12)])
    assert metrics.top1 == pytest.approx(1 / 12)
    assert metrics.top5 == pytest.approx(5 / 12)
    assert metrics.top1 == np.trace(metrics.confusion) / 12


def test_loss_of_huge_logits_is_finite_and_right():
    metrics = measure(np.array([[3e4, -3e4], [0.0, 1e4]], np.float32), np.array([1, 1]), ["a", "b"])
    assert metrics.loss == pytest.approx(3e4)


@pytest.mark.parametrize(("share_right", "ece"), [(0.8, 0.0), (0.5, 0.3), (1.0, 0.2)])
def test_calibration_error_is_the_gap_between_confidence_and_accuracy(share_right: float, ece: float):
    labels = np.zeros(100, int)
    predicted = (np.arange(100) >= 100 * share_right).astype(int)
    metrics = measure(certain(predicted, np.full(100, 0.8)), labels, ["a", "b"])
    assert metrics.ece == pytest.approx(ece, abs=1e-12)


def test_gaps_of_opposite_sign_do_not_cancel():
    labels = np.zeros(100, int)
    predicted = np.repeat([0, 1], 50)  # always right at 60 %, always wrong at 90 %
    metrics = measure(certain(predicted, np.repeat([0.6, 0.9], 50)), labels, ["a", "b"])
    assert metrics.ece == pytest.approx(0.5 * 0.4 + 0.5 * 0.9)


def test_bins_hold_every_image_once_and_lie_in_order():
    logits, labels = noisy(300, 7)
    metrics = measure(logits * 4, labels, list("abcdefg"))
    assert len(metrics.bins) == BINS
    assert sum(b.count for b in metrics.bins) == 300
    for i, b in enumerate(metrics.bins):
        assert i / BINS <= b.confidence <= (i + 1) / BINS
    assert sum(b.count * b.accuracy for b in metrics.bins) == pytest.approx(300 * metrics.top1)


def test_full_certainty_falls_into_the_last_bin():
    metrics = measure(np.array([[1e6, 0.0]]), np.array([0]), ["a", "b"])
    assert metrics.bins[-1].count == 1
    assert metrics.ece == 0.0


def test_a_class_that_is_never_seen_and_never_predicted_scores_zero_without_a_warning():
    metrics = measure(np.array([[2.0, 1.0, 0.0], [0.0, 1.0, -1.0]]), np.array([0, 0]), ABC)
    b, c = metrics.per_class[1:]
    assert (b.precision, b.recall, b.f1, b.support) == (0, 0, 0, 0)
    assert (c.precision, c.recall, c.f1, c.support) == (0, 0, 0, 0)
    assert metrics.confusion.shape == (3, 3)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_outputs_that_are_not_finite_are_an_error_with_their_number(bad: float):
    logits, labels = noisy(10, 3)
    logits[3, 1] = logits[7, 0] = logits[7, 2] = bad
    with pytest.raises(UserError, match="for 2 of 10 images"):
        measure(logits, labels, ABC)


def test_no_images_are_an_error():
    with pytest.raises(UserError, match="has no images"):
        measure(np.zeros((0, 3)), np.zeros(0, int), ABC)


def test_json_is_complete_and_plain():
    logits, labels = noisy(60, 3)
    metrics = measure(logits, labels, ABC)
    document = json.loads(json.dumps(metrics.to_json()))
    assert metrics.summary().items() <= document.items()
    means = {"macro_f1", "balanced_accuracy"}
    assert set(metrics.summary()) == means | {"images", "top1", "top5", "loss", "ece", "temperature", "unscaled_ece"}
    assert document["loss"] == round(metrics.loss, 6)
    assert document["confusion"] == metrics.confusion.tolist()
    assert [score["name"] for score in document["per_class"]] == ABC
    assert len(document["bins"]) == BINS


# Temperature


def test_a_temperature_divides_the_logits_everywhere_and_changes_no_prediction():
    logits, labels = noisy(300, 3)
    scaled, same = Multiclass(tuple(ABC), 0.5), Multiclass(tuple(ABC))
    np.testing.assert_allclose(scaled.means(logits), same.means(2 * logits), rtol=1e-12)
    torch.testing.assert_close(
        scaled.meaning(torch.from_numpy(logits)).double(), torch.from_numpy(scaled.means(logits))
    )
    np.testing.assert_allclose(scaled.losses(logits, labels), same.losses(2 * logits, labels), rtol=1e-12)
    np.testing.assert_allclose(scaled.margins(logits), same.margins(2 * logits), rtol=1e-12)
    given, expected, plain = (
        task.measure(outputs, labels) for task, outputs in ((scaled, logits), (same, 2 * logits), (same, logits))
    )
    assert (given.loss, given.ece, given.gap) == pytest.approx((expected.loss, expected.ece, expected.gap))
    assert (given.unscaled_ece, given.unscaled_gap) == pytest.approx((plain.ece, plain.gap))
    assert given.confusion.tolist() == plain.confusion.tolist()
    samples = scaled.sample(given, logits, labels)
    assert samples.whole["ece"].mean() == pytest.approx(same.sample(expected, 2 * logits, labels).whole["ece"].mean())


def test_the_calibration_error_is_shown_before_and_after():
    logits, labels = noisy(400, 3)
    task, measured, line = Multiclass(tuple(ABC)).calibrated(logits / 5, labels)
    scores = task.measure(logits / 5, labels)
    assert scores.ece <= measured["crossfitted_ece"] < scores.unscaled_ece / 2
    assert scores.unscaled_gap < -0.1
    assert f"Temperature {task.temperature:.2f}, fitted to 400 validation images" in line
    assert f"instead of {scores.unscaled_ece:.1%}; without it the model is underconfident by" in line
    assert f"  before scaling   {scores.unscaled_ece:>7.2%}  (underconfident by" in scores.table()
    assert f"before: calibration error {scores.unscaled_ece:.1%}" in task.charts(scores)[1].help
    plain = measure(logits, labels, ABC)
    assert "before" not in plain.table() + Multiclass(tuple(ABC)).charts(plain)[1].help


def test_scores_of_earlier_versions_have_no_temperature():
    logits, labels = noisy(60, 3)
    document = measure(logits, labels, ABC).to_json()
    for name in ("gap", "temperature", "unscaled_ece", "unscaled_gap"):
        del document[name]
    restored = Multiclass(tuple(ABC)).restore(document)
    assert (restored.temperature, restored.unscaled_ece) == (1.0, document["ece"])
    assert restored.gap == restored.unscaled_gap == pytest.approx(measure(logits, labels, ABC).gap, abs=1e-6)


@pytest.mark.parametrize("temperature", [0, -1.0, float("nan"), float("inf"), "1", None, [1.0]])
def test_a_temperature_is_a_positive_number(temperature: object):
    with pytest.raises(UserError, match="'temperature' must be a positive number"):
        Multiclass.from_json({"classes": ABC, "temperature": temperature})


# Single predictions


def test_the_worst_are_wrong_predictions_by_their_loss():
    outputs = np.array([[5, 0, 0], [0, 1, 0], [0, 9, 0], [0, 0.1, 0.0]])
    assert ANIMALS.worst(outputs, np.array([0, 0, 2, 1]), 9).tolist() == [2, 1]
    assert ANIMALS.worst(outputs, np.array([0, 0, 2, 1]), 1).tolist() == [2]
    assert not len(ANIMALS.worst(outputs, np.array([0, 1, 1, 1]), 9))


def test_the_best_are_right_predictions_of_every_class_in_turn():
    outputs = np.array([[9, 0, 0], [8, 0, 0], [0, 1, 0], [0, 2, 0], [0, 0, 5], [0, 0, 9]])
    assert ANIMALS.best(outputs, np.array([0, 0, 1, 1, 2, 0]), 9).tolist() == [0, 4, 3, 1, 2]


def test_the_margin_is_the_lead_of_the_first_class_over_the_second():
    outputs = np.log([[0.5, 0.3, 0.2], [0.4, 0.38, 0.22], [0.9, 0.05, 0.05]])
    assert ANIMALS.margins(outputs) == pytest.approx([0.2, 0.02, 0.85])
    assert Multiclass(("cat",)).margins(np.zeros((2, 1))).tolist() == [1, 1]


def test_the_most_frequent_mistakes_have_their_worst_examples():
    labels = np.arange(30) % 3
    logits = np.zeros((30, 3), np.float32)
    logits[np.arange(30), labels] = 2
    logits[4] = [9, 0, 0]  # is 1
    logits[7] = [5, 0, 0]
    logits[5] = [0, 4, 0]  # is 2
    assert ANIMALS.worst(logits, labels, 8).tolist() == [4, 7, 5]
    found = ANIMALS.confused(logits, labels, 6, 6)
    assert [(pair.true, pair.said, pair.count, pair.of, pair.numbers) for pair in found] == [
        ("dog", "cat", 2, 10, (4, 7)),
        ("owl", "dog", 1, 10, (5,)),
    ]


def test_captions_have_what_is_true_and_what_was_predicted():
    chances = np.array([0.7, 0.2, 0.1])
    right, wrong = ANIMALS.caption(chances, 0), ANIMALS.caption(chances, 2)
    assert [line[:2] for line in right] == [("right: cat 70.0%", "plain"), ("next: dog 20.0%", "muted")]
    assert [line[:2] for line in wrong] == [("true: owl 10.0%", "plain"), ("predicted: cat 70.0%", "wrong")]
    assert ANIMALS.said(chances, 2) == ("cat (70%)", "owl")


class Binary(Multiclass):
    """Two classes with one output, as a subclass that says only what its output means."""

    outputs = 1

    def meaning(self, outputs):
        second = 1 / (1 + np.exp(-outputs))
        return np.concatenate([1 - second, second], axis=1)


def test_a_subclass_may_have_fewer_outputs_than_classes():
    task, outputs = Binary(("no", "yes")), np.array([[-2.0], [-0.1], [3.0], [0.5]])
    labels = np.array([0, 1, 1, 1])
    scores = task.measure(outputs, labels)
    chances = 1 / (1 + np.exp(-outputs[:, 0]))
    assert scores.top1 == 0.75
    assert scores.loss == pytest.approx(-np.log(np.where(labels, chances, 1 - chances)).mean())
    assert task.worst(outputs, labels, 4).tolist() == [1]
    assert task.sample(scores, outputs, labels).whole["top1"].shape
    assert task.same(outputs, outputs, 1e-3).all()
    flipped = outputs * [[1], [-1], [1], [-1]]
    assert task.differ(flipped, outputs, 1e-3).tolist() == [False, True, False, True]
