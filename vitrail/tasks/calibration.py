"""Calibration: how often predictions of similar confidence are right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitrail.tasks.scores import Floats, Numbers

BINS = 15  # of confidence


@dataclass(frozen=True)
class Bin:
    """Predictions of similar confidence; an empty bin has the middle of its range as confidence."""

    confidence: float
    accuracy: float
    count: int


def bin_numbers(confidence: Floats) -> Numbers:
    """The bin of equal width that each confidence lies in; a bin contains its upper edge."""
    return np.clip(np.ceil(confidence * BINS).astype(np.int64) - 1, 0, BINS - 1)


def reliability_bins(confidence: Floats, right: NDArray[np.bool_]) -> list[Bin]:
    """How often predictions of similar confidence are right."""
    index = bin_numbers(confidence)
    return [
        Bin(float(confidence[inside].mean()), float(right[inside].mean()), int(inside.sum()))
        if (inside := index == i).any()
        else Bin((i + 0.5) / BINS, 0.0, 0)
        for i in range(BINS)
    ]


def calibration_error(bins: Sequence[Bin]) -> float:
    """The mean gap between confidence and accuracy."""
    return sum(b.count * abs(b.accuracy - b.confidence) for b in bins) / max(sum(b.count for b in bins), 1)
