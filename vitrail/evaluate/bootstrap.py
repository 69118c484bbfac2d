"""How sure a measured number is: the same number over many samples of the same images, drawn with replacement.

Every sample is a row of weights, how often each image was drawn. They depend on the number of images alone, so two
models measured on the same images are measured on the same samples, and what they differ by can be told from the
differences.

Legend: R samples, N images, K classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.evaluate.metrics import BINS, AnyMetrics, LabelMetrics, Metrics, each_image

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Interval = tuple[float, float]

SAMPLES = 1000
_AT_ONCE = 2**22  # weights in memory


@dataclass(frozen=True)
class Samples:
    """What was measured on every sample: of the whole (R,), and of each class, label or number (R, K)."""

    whole: dict[str, Floats] = field(default_factory=dict)
    each: dict[str, Floats] = field(default_factory=dict)

    def interval(self, name: str) -> Interval | None:
        """Where 95 % of the samples lie; None for a number that was not sampled."""
        return _interval(self.whole[name]) if name in self.whole else None

    def intervals(self, name: str) -> list[Interval] | None:
        """The same for each class, label or number."""
        if name not in self.each:
            return None
        low, high = np.quantile(self.each[name], [0.025, 0.975], axis=0)
        return list(zip(low.tolist(), high.tolist(), strict=True))


def _interval(values: Floats) -> Interval:
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def difference(first: Samples, second: Samples, name: str) -> Interval | None:
    """Where 95 % of the differences of two models lie that were measured on the same images."""
    if name not in first.whole or name not in second.whole:
        return None
    return _interval(second.whole[name] - first.whole[name])


def sample(metrics: AnyMetrics, outputs: NDArray[np.float32] | None, targets: NDArray[Any] | None) -> Samples:
    """Samples what was measured; without the outputs of the model, what a confusion matrix tells."""
    if isinstance(metrics, Metrics):
        if outputs is None or targets is None:
            labels, said = (
                np.repeat(axis.ravel(), metrics.confusion.ravel()) for axis in np.indices(metrics.confusion.shape)
            )
            return _sample_classes(labels, said, len(metrics.per_class), {"top1": (labels == said).astype(float)}, None)
        return _sample_classes(*_answers(outputs.astype(np.float64), targets))
    if outputs is None or targets is None:
        return Samples()
    if isinstance(metrics, LabelMetrics):
        thresholds = np.array([score.threshold for score in metrics.per_label])
        return _sample_labels(metrics.probabilities, metrics.targets > 0.5, thresholds)
    return _sample_values(metrics.predicted, metrics.targets)


def _draws(images: int) -> Iterator[Floats]:
    """How often each image is in each sample, (r, N), some samples at a time."""
    rng = np.random.default_rng(0)
    step = max(_AT_ONCE // images, 1)
    for at in range(0, SAMPLES, step):
        rows = min(step, SAMPLES - at)
        drawn = rng.integers(0, images, (rows, images)) + images * np.arange(rows)[:, None]
        yield np.bincount(drawn.ravel(), minlength=rows * images).reshape(rows, images).astype(np.float64)


def _collect(parts: list[tuple[dict[str, Floats], dict[str, Floats]]]) -> Samples:
    whole, each = zip(*parts, strict=True)
    return Samples(
        {name: np.concatenate([part[name] for part in whole]) for name in whole[0]},
        {name: np.concatenate([part[name] for part in each]) for name in each[0]},
    )


def _sums(weights: Floats, groups: Ints, count: int, values: Floats | None = None) -> Floats:
    """The weights of every group of images, (r, count), times the images' values if there are some."""
    rows = np.arange(len(weights))[:, None] * count
    weighted = weights if values is None else weights * values
    sums = np.bincount((rows + groups).ravel(), weighted.ravel(), minlength=len(weights) * count)
    return sums.reshape(len(weights), count).astype(np.float64, copy=False)


# Classes --------------------------------------------------------------------------------------------------


def _answers(logits: Floats, labels: Ints) -> tuple[Ints, Ints, int, dict[str, Floats], tuple[Floats, Floats]]:
    """Of every image its class, the class that is said, what it adds to each mean, and the confidence."""
    rank, losses, confidence = each_image(logits, labels)
    right = (rank == 0).astype(np.float64)
    means = {"top1": right, "top5": (rank < 5).astype(np.float64), "loss": losses}
    return labels, logits.argmax(axis=1), logits.shape[1], means, (confidence, right)


def _sample_classes(
    labels: Ints, said: Ints, classes: int, means: Mapping[str, Floats], sure: tuple[Floats, Floats] | None
) -> Samples:
    parts = []
    for weights in _draws(len(labels)):
        whole = {name: weights @ values / len(labels) for name, values in means.items()}
        if sure is not None:
            confidence, right = sure
            bins = np.clip(np.ceil(confidence * BINS).astype(np.int64) - 1, 0, BINS - 1)
            whole["ece"] = np.abs(_sums(weights, bins, BINS, right - confidence)).sum(axis=1) / len(labels)
        hits = _sums(weights, labels, classes, (labels == said).astype(np.float64))
        support, chosen = _sums(weights, labels, classes), _sums(weights, said, classes)
        each = {
            "precision": hits / np.maximum(chosen, 1),
            "recall": hits / np.maximum(support, 1),
            "f1": 2 * hits / np.maximum(chosen + support, 1),
        }
        parts.append((whole, each))
    return _collect(parts)


# Labels ---------------------------------------------------------------------------------------------------


def _sample_labels(chances: Floats, true: NDArray[np.bool_], thresholds: Floats) -> Samples:
    said = chances >= thresholds
    seen = true.any(axis=0)
    order = np.argsort(-chances, axis=0, kind="stable")
    # Images of like probability are found together: the precision at each of them is that at the last.
    ends = [_last_of_ties(chances[order[:, k], k]) for k in range(chances.shape[1])]
    loss = -np.log(np.clip(np.where(true, chances, 1 - chances), 1e-300, 1)).mean(axis=1)
    parts = []
    for weights in _draws(len(chances)):
        hits, given, support = (weights @ (part.astype(np.float64)) for part in (said & true, said, true))
        f1 = 2 * hits / np.maximum(given + support, 1)
        ap = np.zeros_like(f1)
        for k in np.flatnonzero(seen):
            drawn = weights[:, order[:, k]]
            found = drawn * true[order[:, k], k]
            precision = np.cumsum(found, axis=1)[:, ends[k]] / np.maximum(np.cumsum(drawn, axis=1)[:, ends[k]], 1)
            ap[:, k] = (found * precision).sum(axis=1) / np.maximum(found.sum(axis=1), 1)
        micro = 2 * hits.sum(axis=1) / np.maximum((given + support).sum(axis=1), 1)
        drawn_at_all = support > 0
        known = np.maximum(drawn_at_all.sum(axis=1), 1)
        whole = {"map": (ap * drawn_at_all).sum(axis=1) / known, "macro_f1": (f1 * drawn_at_all).sum(axis=1) / known}
        whole |= {"micro_f1": micro, "loss": weights @ loss / len(chances)}
        each = {
            "ap": ap,
            "precision": hits / np.maximum(given, 1),
            "recall": hits / np.maximum(support, 1),
            "f1": f1,
        }
        parts.append((whole, each))
    return _collect(parts)


def _last_of_ties(descending: Floats) -> Ints:
    """For each of some sorted values the place of the last that equals it."""
    last = np.flatnonzero(np.append(np.diff(descending) != 0, True))
    return last[np.searchsorted(last, np.arange(len(descending)))]


# Numbers --------------------------------------------------------------------------------------------------


def _sample_values(predicted: Floats, true: Floats) -> Samples:
    errors = predicted - true
    middle = true - true.mean(axis=0)  # so that the variance loses no digits
    parts = []
    for weights in _draws(len(true)):
        mae, mse = weights @ np.abs(errors) / len(true), weights @ errors**2 / len(true)
        spread = weights @ middle**2 / len(true) - (weights @ middle / len(true)) ** 2
        r2 = np.where(spread > 0, 1 - mse / np.where(spread > 0, spread, 1), 0.0)
        each = {"mae": mae, "rmse": np.sqrt(mse), "r2": r2}
        parts.append(({name: values.mean(axis=1) for name, values in each.items()}, each))
    return _collect(parts)
