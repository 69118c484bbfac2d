"""Calibration: how accurate predictions of a given confidence are, and the temperature that corrects them.

Temperature scaling: Guo et al., 2017, https://arxiv.org/abs/1706.04599.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitrail.tasks.arrays import logsumexp
from vitrail.tasks.scores import Floats, Numbers

BINS = 15  # bins of confidence
COLDEST, HOTTEST = 0.05, 20.0  # range of temperatures


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


def calibration_gap(bins: Sequence[Bin]) -> float:
    """Mean confidence minus accuracy: above 0 predictions are overconfident."""
    return sum(b.count * (b.confidence - b.accuracy) for b in bins) / max(sum(b.count for b in bins), 1)


def top_probability(logits: Floats) -> Floats:
    """The largest probability of each image, (N,), from logits (N, K)."""
    return np.asarray(np.exp(logits.max(axis=1) - logsumexp(logits)))


def fit_temperature(logits: NDArray[np.floating], labels: Numbers) -> float:
    """The temperature by which to divide logits, (N, K), for the lowest cross-entropy of the labels.

    Few images do not suffice for extreme temperatures. If all predictions are right, cross-entropy alone would make
    them infinitely certain: one image in N + 2 counts as random, as in Platt scaling. And a prior, log T normal with
    standard deviation 1, weighs as much as about one image.
    """
    from scipy.optimize import minimize_scalar  # slow to import

    images, classes = logits.shape
    shifted = logits - logits.max(axis=1, keepdims=True)  # for precision; probabilities do not change
    random = 1 / (images + 2)
    own = shifted[np.arange(images), labels].sum(dtype=np.float64)
    target = (1 - random) * own + random * shifted.sum(dtype=np.float64) / classes

    def cost(log_t: float) -> float:
        scaled = np.exp(shifted * shifted.dtype.type(math.exp(-log_t))).sum(axis=1, dtype=np.float64)
        return float(np.log(scaled).sum() - target * math.exp(-log_t) + log_t**2 / 2)

    found = minimize_scalar(cost, bounds=(math.log(COLDEST), math.log(HOTTEST)), method="bounded")
    return round(math.exp(found.x), 4)


def crossed_error(logits: NDArray[np.floating], labels: Numbers, right: NDArray[np.bool_]) -> float:
    """The calibration error after scaling each half of the images by the temperature fitted to the other half.

    On the images that it was fitted to, a temperature looks better than it is.
    """
    confidence = np.empty(len(logits))
    for half, other in ((slice(0, None, 2), slice(1, None, 2)), (slice(1, None, 2), slice(0, None, 2))):
        confidence[half] = top_probability(
            logits[half].astype(np.float64) / fit_temperature(logits[other], labels[other])
        )
    return calibration_error(reliability_bins(confidence, right))
