"""Regression: what is measured and chosen."""

from __future__ import annotations

import numpy as np
import pytest
from measuring import measure_values
from sklearn.metrics import mean_absolute_error, r2_score

from vitrail.errors import UserError
from vitrail.tasks import Regression

PEOPLE = Regression(("age", "height"), (40.0, 1.7), (10.0, 0.1))


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


def test_outputs_that_are_not_finite_are_refused():
    outputs = np.zeros((10, 1))
    outputs[3] = np.nan
    with pytest.raises(UserError, match="for 1 of 10 images"):
        measure_values(outputs, np.zeros((10, 1)), ("x",), (0,), (1,))


def test_the_mean_and_spread_are_those_of_the_training_images():
    targets = np.array([[1, 10], [3, 30]], np.float32)
    assert Regression(("x", "y")).fitted(targets) == Regression(("x", "y"), (2.0, 20.0), (1.0, 10.0))


def test_values_are_most_wrong_by_their_errors_whatever_their_units():
    targets = np.array([[40, 1.7], [40, 1.7], [60, 1.7]])
    outputs = np.array([[0.5, 0], [0, 3], [0, 0]])  # off by 5 years, by 30 cm, by 20 years
    assert PEOPLE.worst(outputs, targets, 9).tolist() == [1, 2, 0]
    assert PEOPLE.best(outputs, targets, 2).tolist() == [0, 2]
    assert PEOPLE.right(outputs, targets).tolist() == [True, False, False]


def test_values_have_no_margin():
    with pytest.raises(UserError, match="has no confidence"):
        PEOPLE.margins(np.zeros((2, 2)))


def test_captions_have_the_value_with_the_largest_error():
    lines = PEOPLE.caption(np.array([40.0, 2.0]), np.array([41.0, 1.7]))
    assert [line[:2] for line in lines] == [("true: height 1.7", "plain"), ("predicted: height 2", "wrong")]
