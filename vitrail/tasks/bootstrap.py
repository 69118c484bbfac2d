"""Bootstrap confidence intervals: a score over resamples of the images, drawn with replacement.

A resample is a row of weights: how often each image was drawn. It depends only on the number of images, so models
measured on the same images share their resamples, and differences between them are paired.

Legend: R samples, N images, K classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Interval = tuple[float, float]

SAMPLES = 1000
_AT_ONCE = 2**22  # weights in memory at a time


@dataclass(frozen=True)
class Samples:
    """The scores of all resamples: overall, (R,), and per class, label or value, (R, K)."""

    whole: dict[str, Floats] = field(default_factory=dict)
    each: dict[str, Floats] = field(default_factory=dict)

    def interval(self, name: str) -> Interval | None:
        """The 95 % interval of an overall score; None if it was not resampled."""
        return _interval(self.whole[name]) if name in self.whole else None

    def intervals(self, name: str) -> list[Interval] | None:
        """The 95 % interval of a score of each class, label or value."""
        if name not in self.each:
            return None
        low, high = np.quantile(self.each[name], [0.025, 0.975], axis=0)
        return list(zip(low.tolist(), high.tolist(), strict=True))


def _interval(values: Floats) -> Interval:
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def difference(first: Samples, second: Samples, name: str) -> Interval | None:
    """The 95 % interval of the difference between two models measured on the same images."""
    if name not in first.whole or name not in second.whole:
        return None
    return _interval(second.whole[name] - first.whole[name])


def draws(images: int) -> Iterator[Floats]:
    """Yields the weights of the resamples in blocks, (r, N)."""
    rng = np.random.default_rng(0)
    step = max(_AT_ONCE // images, 1)
    for at in range(0, SAMPLES, step):
        rows = min(step, SAMPLES - at)
        drawn = rng.integers(0, images, (rows, images)) + images * np.arange(rows)[:, None]
        yield np.bincount(drawn.ravel(), minlength=rows * images).reshape(rows, images).astype(np.float64)


def collect(parts: list[tuple[dict[str, Floats], dict[str, Floats]]]) -> Samples:
    whole, each = zip(*parts, strict=True)
    return Samples(
        {name: np.concatenate([part[name] for part in whole]) for name in whole[0]},
        {name: np.concatenate([part[name] for part in each]) for name in each[0]},
    )


def sums(weights: Floats, groups: Ints, count: int, values: Floats | None = None) -> Floats:
    """The sum of the weights, or of weights times `values`, over each group of images: (r, count)."""
    rows = np.arange(len(weights))[:, None] * count
    weighted = weights if values is None else weights * values
    sums = np.bincount((rows + groups).ravel(), weighted.ravel(), minlength=len(weights) * count)
    return sums.reshape(len(weights), count).astype(np.float64, copy=False)
