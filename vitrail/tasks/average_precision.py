"""Average precision with its standard error, thresholds of the best F1, and bootstrap samples of both."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vitrail.tasks.bootstrap import Samples, collect, draws
from vitrail.tasks.scores import Floats, Numbers


def ap_and_threshold(chances: Floats, true: NDArray[np.bool_]) -> tuple[float | None, float]:
    """Average precision, and the threshold of the best F1: midway between the last predicted image and the next."""
    from sklearn.metrics import average_precision_score, precision_recall_curve  # slow to import

    if not true.any():
        return None, 0.5
    precision, recall, thresholds = precision_recall_curve(true, chances)
    best = int(np.argmax(precision * recall / np.maximum(precision + recall, 1e-12)))
    next_one = thresholds[best - 1] if best else 0.0
    return float(average_precision_score(true, chances)), float(thresholds[best] + next_one) / 2


def last_of_ties(descending: Floats) -> Numbers:
    """For each of some sorted values, the index of the last one equal to it."""
    last = np.flatnonzero(np.append(np.diff(descending) != 0, True))
    return last[np.searchsorted(last, np.arange(len(descending)))]


def map_standard_error(chances: Floats, true: NDArray[np.bool_]) -> float:
    """The standard error of the mean average precision over samples of the images, by the infinitesimal jackknife."""
    seen = np.flatnonzero(true.any(axis=0))
    if not len(seen):
        return 0.0
    influence = np.mean([_ap_influence(chances[:, k], true[:, k]) for k in seen], axis=0)
    return float(np.sqrt((influence**2).sum()))


def _ap_influence(chances: Floats, true: NDArray[np.bool_]) -> Floats:
    """The derivative of a label's average precision by the weight of each image, (N,)."""
    order = np.argsort(-chances, kind="stable")
    hit, sorted_chances = true[order].astype(np.float64), chances[order]
    ends = last_of_ties(sorted_chances)
    starts = len(order) - 1 - last_of_ties(sorted_chances[::-1])[::-1]
    precision = np.cumsum(hit)[ends] / (ends + 1)
    # An image counts as a hit itself, and changes the precision of every hit that is not ranked above it.
    below, lost = (np.cumsum((hit * part / (ends + 1))[::-1])[::-1][starts] for part in (1.0, precision))
    influence = np.empty(len(order))
    influence[order] = hit * (precision - (hit @ precision) / hit.sum() + below) - lost
    return influence / hit.sum()


def sample_labels(chances: Floats, true: NDArray[np.bool_], thresholds: Floats, losses: Floats) -> Samples:
    """Multi-label scores of bootstrap samples, from probabilities and labels, (N, K)."""
    said, seen = chances >= thresholds, true.any(axis=0)
    order = np.argsort(-chances, axis=0, kind="stable")
    # Images with tied probabilities are retrieved together: each has the precision at the last of them.
    ends = [last_of_ties(chances[order[:, k], k]) for k in range(chances.shape[1])]
    parts = []
    for weights in draws(len(chances)):
        hits, given, support = (weights @ (part.astype(np.float64)) for part in (said & true, said, true))
        f1 = 2 * hits / np.maximum(given + support, 1)
        ap = np.zeros_like(f1)
        for k in np.flatnonzero(seen):
            drawn = weights[:, order[:, k]]
            found = drawn * true[order[:, k], k]
            precision = np.cumsum(found, axis=1)[:, ends[k]] / np.maximum(np.cumsum(drawn, axis=1)[:, ends[k]], 1)
            ap[:, k] = (found * precision).sum(axis=1) / np.maximum(found.sum(axis=1), 1)
        there = support > 0
        known = np.maximum(there.sum(axis=1), 1)
        whole = {
            "map": (ap * there).sum(axis=1) / known,
            "macro_f1": (f1 * there).sum(axis=1) / known,
            "micro_f1": 2 * hits.sum(axis=1) / np.maximum((given + support).sum(axis=1), 1),
            "loss": weights @ losses / len(chances),
        }
        each = {
            "ap": ap,
            "precision": hits / np.maximum(given, 1),
            "recall": hits / np.maximum(support, 1),
            "f1": f1,
        }
        parts.append((whole, each))
    return collect(parts)
