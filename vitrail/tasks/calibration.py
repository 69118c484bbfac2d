"""Calibration: how accurate predictions of a given confidence are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitrail.tasks.scores import Floats, Numbers

BINS = 15  # bins of confidence


@dataclass(frozen=True)
class Bin:
    """Predictions of similar confidence; the confidence of an empty bin is its midpoint."""

    confidence: float
    accuracy: float
    count: int


def bin_numbers(confidence: Floats) -> Numbers:
    """The index of the equal-width bin of each confidence; bins include their upper edge."""
    return np.clip(np.ceil(confidence * BINS).astype(np.int64) - 1, 0, BINS - 1)


def reliability_bins(confidence: Floats, right: NDArray[np.bool_]) -> list[Bin]:
    """Accuracy by bin of confidence."""
    index = bin_numbers(confidence)
    return [
        Bin(float(confidence[inside].mean()), float(right[inside].mean()), int(inside.sum()))
        if (inside := index == i).any()
        else Bin((i + 0.5) / BINS, 0.0, 0)
        for i in range(BINS)
    ]


def calibration_error(bins: Sequence[Bin]) -> float:
    """Expected calibration error: the mean gap between confidence and accuracy."""
    return sum(b.count * abs(b.accuracy - b.confidence) for b in bins) / max(sum(b.count for b in bins), 1)
