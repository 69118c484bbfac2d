"""What the charts of a page show: plain numbers, which `report.js` draws.

A chart is a title, a note under it, a sentence for those who cannot see it, and a `spec`: its kind and its numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.evaluate.metrics import BINS, Bin, LabelMetrics, Metrics, ValueMetrics

CELLS = 50  # classes of a confusion matrix at most
BARS = 50
POINTS = 1500  # of a scatter plot at most, and of a curve a tenth

# What the best epoch is chosen by, and what it is called.
MAIN = {"top1": "Top-1 accuracy", "map": "Mean average precision", "r2": "R²"}


@dataclass(frozen=True)
class Chart:
    title: str
    note: str
    label: str
    spec: dict[str, Any]


def curves(rows: Sequence[Mapping[str, float]]) -> list[Chart]:
    """Loss, the main metric and the learning rate over the epochs of a run."""
    main = next(name for name in MAIN if f"val_{name}" in rows[0])
    scores = [row[f"val_{main}"] for row in rows]
    best = int(np.nanargmax(scores))
    epoch, score = int(rows[best]["epoch"]), shown(main, scores[best])
    loss = [_series(rows, "train_loss", "training", "warm"), _series(rows, "val_loss", "validation", "cool")]
    metric = [_series(rows, f"val_{main}", "validation", "cool")]
    if f"train_{main}" in rows[0]:
        metric.insert(0, _series(rows, f"train_{main}", "training", "warm"))
    mark = [epoch, _short(scores[best])]
    return [
        Chart(
            "Loss",
            f"Validation ends at {rows[-1]['val_loss']:.3g}.",
            f"Loss over {len(rows)} epochs: validation ends at {rows[-1]['val_loss']:.3g}.",
            {"kind": "lines", "x": "epoch", "series": loss, "zero": True},
        ),
        Chart(
            MAIN[main],
            f"Best in epoch {epoch}: {score}. That model is the one kept.",
            f"{MAIN[main]} over {len(rows)} epochs: best in epoch {epoch} with {score}.",
            {"kind": "lines", "x": "epoch", "series": metric, "percent": main != "r2", "mark": mark},
        ),
        Chart(
            "Learning rate",
            f"Highest {max(row['lr'] for row in rows):.3g}.",
            "Learning rate over the epochs.",
            {"kind": "lines", "x": "epoch", "series": [_series(rows, "lr", "learning rate", "plain")], "zero": True},
        ),
    ]


def together(runs: Mapping[str, Sequence[Mapping[str, float]]]) -> list[Chart]:
    """Validation loss and the main metric of several runs, over their epochs and over time."""
    first = next((rows[0] for rows in runs.values() if rows), None)
    if first is None:
        return []
    main = next(name for name in MAIN if f"val_{name}" in first)

    def lines(column: str, x: str = "epoch") -> list[dict[str, Any]]:
        return [_series(rows, column, name, number, x) for number, (name, rows) in enumerate(runs.items()) if rows]

    percent = main != "r2"
    score, label = f"val_{main}", "of all runs over each other"
    by_time = {"kind": "lines", "x": "minutes", "series": lines(score, "seconds"), "percent": percent}
    return [
        Chart(
            MAIN[main],
            "Validation, by epoch.",
            f"{MAIN[main]} {label}, by epoch.",
            {"kind": "lines", "x": "epoch", "series": lines(score), "percent": percent},
        ),
        Chart(MAIN[main], "Validation, by time.", f"{MAIN[main]} {label}, by minutes.", by_time),
        Chart(
            "Loss",
            "Validation, by epoch.",
            f"Validation loss {label}.",
            {"kind": "lines", "x": "epoch", "series": lines("val_loss"), "zero": True},
        ),
    ]


def _series(
    rows: Sequence[Mapping[str, float]], column: str, name: str, tone: str | int, x: str = "epoch"
) -> dict[str, Any]:
    scale = 60 if x == "seconds" else 1
    points = [[_short(row[x] / scale), _short(row[column])] for row in rows]
    return {"name": name, "tone": tone, "points": points}


def confusion(metrics: Metrics) -> Chart:
    """The confusion matrix; of many classes, of those that are confused most."""
    counts, names = metrics.confusion, [score.name for score in metrics.per_class]
    totals = counts.sum(axis=1)
    wrong = counts - np.diag(counts.diagonal())
    note = "Rows are true classes, columns what the model said; a cell's shade is its share of the row."
    if len(names) > CELLS:
        most = np.sort(np.argsort(-(wrong.sum(axis=0) + wrong.sum(axis=1)), kind="stable")[:CELLS])
        counts, totals, names = counts[np.ix_(most, most)], totals[most], [names[i] for i in most]
        note = f"The {CELLS} of {len(metrics.per_class)} classes that are confused most. {note}"
    cells = [[int(x), int(y), int(counts[y, x])] for y, x in np.argwhere(counts)]
    right = int(metrics.confusion.trace())
    label = f"Confusion matrix: {right:,} of {metrics.images:,} images are on its diagonal, that is right."
    spec = {"kind": "matrix", "names": names, "cells": cells, "totals": totals.tolist()}
    return Chart("Confusion matrix", note, label, spec)


def reliability(metrics: Metrics) -> Chart:
    """How often the model is right at each confidence."""
    return _reliability(metrics.bins, metrics.ece, "confidence", "right", "predictions")


def label_reliability(metrics: LabelMetrics) -> Chart:
    """How often a label is there at each probability, all labels taken together."""
    chances, true = metrics.probabilities.ravel(), metrics.targets.ravel() > 0.5
    index = np.clip(np.ceil(chances * BINS).astype(int) - 1, 0, BINS - 1)
    bins = [
        Bin(float(chances[inside].mean()), float(true[inside].mean()), int(inside.sum()))
        if (inside := index == i).any()
        else Bin((i + 0.5) / BINS, 0.0, 0)
        for i in range(BINS)
    ]
    error = sum(b.count * abs(b.accuracy - b.confidence) for b in bins) / max(len(chances), 1)
    return _reliability(bins, error, "probability of a label", "has it", "answers")


def _reliability(bins: Sequence[Bin], error: float, sure: str, right: str, things: str) -> Chart:
    total = max(sum(b.count for b in bins), 1)
    off = sum(b.count * (b.confidence - b.accuracy) for b in bins) / total
    lean = "too sure" if off > 0 else "not sure enough"
    rows = [[_short(b.confidence), _short(b.accuracy), b.count] for b in bins]
    return Chart(
        "Reliability",
        f"Where bars end on the diagonal, {sure} is what it claims to be. On average the model is {lean} by "
        f"{100 * abs(off):.1f} points; the calibration error is {percent(error)}.",
        f"Reliability diagram: calibration error {percent(error)}, {lean} on average by {100 * abs(off):.1f} points.",
        {"kind": "reliability", "bins": rows, "sure": sure, "right": right, "things": things},
    )


def average_precision(metrics: LabelMetrics) -> Chart:
    """Average precision of every label, beside what guessing would reach; of many, of the lowest."""
    scores = sorted((s for s in metrics.per_label if s.ap is not None), key=lambda s: s.ap or 0)
    most = f"The {BARS} lowest of {len(scores)}. " if len(scores) > BARS else ""
    scores = scores[:BARS]
    spec = {
        "kind": "bars",
        "names": [s.name for s in scores],
        "values": [_short(s.ap or 0.0) for s in scores],
        "marks": [_short(s.support / metrics.images) for s in scores],
    }
    label = f"Average precision of every label; the mean is {percent(metrics.map)}."
    return Chart("Average precision", f"{most}Ticks are what guessing would reach.", label, spec)


def precision_recall(metrics: LabelMetrics) -> Chart:
    """How many of the labels given are right against how many are found: all labels as one, and the weakest."""
    from sklearn.metrics import precision_recall_curve  # slow to load, for this task only

    scores = [(k, s) for k, s in enumerate(metrics.per_label) if s.ap is not None]
    weakest = min(scores, key=lambda pair: pair[1].ap or 0)
    series = []
    for name, tone, columns in (
        ("all labels", "cool", slice(None)),
        (f"{weakest[1].name}, the weakest", "warm", slice(weakest[0], weakest[0] + 1)),
    ):
        precision, recall, _ = precision_recall_curve(
            metrics.targets[:, columns].ravel() > 0.5, metrics.probabilities[:, columns].ravel()
        )
        chosen = np.unique(np.linspace(0, len(recall) - 1, POINTS // 10).astype(int))[::-1]
        points = [[_short(recall[i]), _short(precision[i])] for i in chosen]
        series.append({"name": name, "tone": tone, "points": points})
    spec = {"kind": "lines", "x": "recall", "y": "precision", "series": series, "percent": True, "square": True}
    return Chart(
        "Precision and recall",
        "As the threshold falls, more is found and less of it is right.",
        "Precision against recall of all labels, and of the weakest.",
        spec,
    )


def predicted(metrics: ValueMetrics, most: int = 6) -> list[Chart]:
    """Predicted against true values of each number; of many, of those that fit worst."""
    order = sorted(range(len(metrics.per_value)), key=lambda k: metrics.per_value[k].r2)
    rows = np.arange(len(metrics.targets))
    if len(rows) > POINTS:
        rows = np.sort(np.random.default_rng(0).choice(rows, POINTS, replace=False))
    charts = []
    for k in sorted(order[:most]):
        score = metrics.per_value[k]
        points = [[_short(metrics.targets[i, k]), _short(metrics.predicted[i, k])] for i in rows]
        note = f"R² {score.r2:.3f}, mean error {score.mae:.3g}. On the line, predicted is true."
        label = f"Predicted against true {score.name}: R² {score.r2:.3f}."
        charts.append(Chart(score.name, note, label, {"kind": "scatter", "points": points, "name": score.name}))
    return charts


def distance(values: NDArray[np.floating], img_size: tuple[int, int], images: int) -> Chart:
    """How far every head of every layer looks: (L, H) in pixels, with NaN where a layer has fewer heads."""
    layers = [heads[np.isfinite(heads)] for heads in values]
    means = [float(heads.mean()) for heads in layers]
    spec = {"kind": "heads", "values": [[_short(v) for v in heads] for heads in layers], "height": img_size[0]}
    note = (
        f"Each dot is a head: how many pixels away, on average over {images} images, the patches lie that it "
        f"attends to. From {means[0]:.1f} px in the first layer to {means[-1]:.1f} px in the last."
    )
    return Chart("Attention distance", note, note, spec)


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f}\u00a0%"


def shown(name: str, value: float) -> str:
    """A number as people read it: shares in percent, others as they are."""
    shares = ("top1", "top5", "ece", "map", "macro_f1", "micro_f1", "precision", "recall", "f1", "ap")
    return percent(value) if name in shares else f"{value:.3f}" if name in ("r2", "loss") else f"{value:.3g}"


def _short(value: float) -> float | None:
    """A number with no more digits than a chart shows; None, a gap, for what is none."""
    return float(f"{value:.5g}") if np.isfinite(value) else None
