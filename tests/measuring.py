"""Scores of arrays, in one call."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vitrail.tasks import Multiclass, Multilabel, Regression
from vitrail.tasks.class_scores import MulticlassScores
from vitrail.tasks.multilabel import MultilabelScores
from vitrail.tasks.regression import RegressionScores


def measure(logits: np.ndarray, labels: np.ndarray, classes: Sequence[str]) -> MulticlassScores:
    return Multiclass(tuple(classes)).measure(logits, labels)


def measure_labels(
    logits: np.ndarray, targets: np.ndarray, classes: Sequence[str], thresholds: Sequence[float] = ()
) -> MultilabelScores:
    return Multilabel(tuple(classes), tuple(thresholds)).measure(logits, targets)


def measure_values(
    outputs: np.ndarray, targets: np.ndarray, classes: Sequence[str], mean: Sequence[float], std: Sequence[float]
) -> RegressionScores:
    return Regression(tuple(classes), tuple(mean), tuple(std)).measure(outputs, targets)
