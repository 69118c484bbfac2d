"""The temperature of the lowest cross-entropy, within what the number of images supports."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import log_softmax

from vitrail.tasks.calibration import (
    COLDEST,
    HOTTEST,
    calibration_error,
    crossed_error,
    fit_temperature,
    reliability_bins,
    top_probability,
)


def drawn(images: int, classes: int, sharp: float = 2.0) -> tuple[np.ndarray, np.ndarray]:
    """Calibrated logits: labels drawn from their own probabilities."""
    random = np.random.default_rng(0)
    logits = sharp * random.normal(size=(images, classes))
    chances = np.exp(log_softmax(logits, axis=1))
    labels = (chances.cumsum(axis=1) > random.random((images, 1))).argmax(axis=1)
    return logits.astype(np.float32), labels


def cross_entropy(logits: np.ndarray, labels: np.ndarray) -> float:
    return float(-log_softmax(logits.astype(np.float64), axis=1)[np.arange(len(labels)), labels].mean())


@pytest.mark.parametrize("factor", [0.2, 1.0, 4.0])
def test_it_is_that_of_a_grid_search(factor: float):
    logits, labels = drawn(2000, 10)
    logits *= factor
    grid = np.geomspace(COLDEST, HOTTEST, 2000)
    best = grid[np.argmin([cross_entropy(logits / t, labels) for t in grid])]
    found = fit_temperature(logits, labels)
    assert found == pytest.approx(best, rel=0.02)
    assert found == pytest.approx(factor, rel=0.1)
    assert cross_entropy(logits / found, labels) == pytest.approx(cross_entropy(logits / best, labels), abs=1e-4)


@pytest.mark.parametrize("images", [1, 10, 1000])
def test_right_predictions_become_as_certain_as_their_number_allows(images: int):
    labels = np.arange(images) % 4
    logits = np.eye(4, dtype=np.float32)[labels]
    confidence = float(top_probability(logits.astype(np.float64) / fit_temperature(logits, labels)).mean())
    assert 1 / 4 < confidence < (images + 1) / (images + 2)
    if images == 1000:
        assert confidence > 0.99


def test_a_single_image_does_not_make_it_extreme():
    logits = np.array([[4.0, 0.0, 0.0]], np.float32)
    assert 0.5 < fit_temperature(logits, np.array([0])) < 1.5
    assert 1 < fit_temperature(logits, np.array([1])) < 3
    assert fit_temperature(np.zeros((0, 3), np.float32), np.zeros(0, np.int64)) == pytest.approx(1.0, abs=1e-3)


def test_wrong_predictions_and_equal_logits_stay_in_the_range():
    wrong = np.eye(3, dtype=np.float32)[np.zeros(500, int)] * 10
    assert 5 < fit_temperature(wrong, np.ones(500, np.int64)) <= HOTTEST
    assert fit_temperature(np.ones((500, 3), np.float32), np.ones(500, np.int64)) == pytest.approx(1.0, abs=1e-3)
    large = np.array([[1e30, 0.0]] * 3, np.float32)
    assert COLDEST <= fit_temperature(large, np.array([0, 0, 1])) <= HOTTEST


def test_the_cross_fitted_error_uses_no_image_twice():
    """The halves want opposite temperatures, so that each makes the other worse."""
    logits, labels = drawn(2000, 10)
    logits[::2] *= 4
    logits[1::2] /= 4
    right = logits.argmax(axis=1) == labels
    together, apart = crossed_error(*drawn(2000, 10), right), crossed_error(logits, labels, right)
    assert together < 0.05 < 0.2 < apart


def test_calibrated_predictions_have_an_error_by_chance():
    random, errors = np.random.default_rng(0), []
    for _ in range(100):
        confidence = random.beta(20, 1, 359)
        errors.append(calibration_error(reliability_bins(confidence, random.random(359) < confidence)))
    assert np.mean(errors) == pytest.approx(0.02, abs=0.005)  # as docs/evaluate.md says
