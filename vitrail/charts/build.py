"""Builds charts from measured values. A task calls those that fit its scores."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vitrail.charts.kinds import (
    Bars,
    ErrorBars,
    Heads,
    Line,
    Lines,
    Matrix,
    Reliability,
    Scatter,
    Tone,
    Values,
)
from vitrail.charts.measure import Measure, count, lean, number, percent

Rows = Sequence[Mapping[str, float]]  # of metrics.csv, one per epoch

_COLUMNS = 6  # maximum scatter plots, one per value
_PARTS: dict[str, tuple[str, Tone]] = {"train": ("training", "warm"), "val": ("validation", "cool")}  # of columns
_LOSS = Measure("loss", "loss", heading="Loss", lower_is_better=True)


# Training -------------------------------------------------------------------------------------------------


def curves(rows: Rows, main: Measure, kept: int | None = None) -> list[Lines]:
    """Loss, the main measure and the learning rate over the epochs of a run.

    The epoch whose model is kept is marked; by default it is the one with the best score.
    """
    scores = _column(rows, f"val_{main.name}")
    best = int(np.nanargmin(scores) if main.lower_is_better else np.nanargmax(scores))
    row = best if kept is None else next(i for i, row in enumerate(rows) if row["epoch"] == kept)
    epoch, score, highest = int(rows[row]["epoch"]), float(scores[row]), float(scores[best])
    other = f"kept epoch {epoch}: {main.text(score)}; best {main.text(highest)}"
    note = f"best validation score {main.text(highest)} in epoch {epoch}" if score == highest else other
    why = "" if score == highest else " It is the last within one standard error of the best."
    metric = [
        _line(rows, f"{part}_{main.name}", name, tone, dot=(epoch, score) if part == "val" else None)
        for part, (name, tone) in _PARTS.items()
        if f"{part}_{main.name}" in rows[0]
    ]
    return [
        losses(rows),
        Lines(
            name="curves",
            title=main.heading or main.title,
            note=note,
            help=f"The model of the marked epoch is kept.{why}",
            x="epoch",
            lines=tuple(metric),
            percent=main.percent,
        ),
        rates(rows),
    ]


def losses(rows: Rows) -> Lines:
    """The training loss over the epochs of a run, and the validation loss where it is measured."""
    parts = {part: _PARTS[part] for part in _PARTS if f"{part}_loss" in rows[0]}
    last = "val" if "val" in parts else "train"
    return Lines(
        name="curves",
        title="Loss" if last == "val" else "Training loss",
        note=f"final {_PARTS[last][0]} loss {rows[-1][f'{last}_loss']:.3f}",
        x="epoch",
        lines=tuple(_line(rows, f"{part}_loss", name, tone) for part, (name, tone) in parts.items()),
        low=0,
    )


def rates(rows: Rows) -> Lines:
    """The learning rate over the epochs of a run."""
    return Lines(
        name="curves",
        title="Learning rate",
        note=f"highest at the end of an epoch: {number(max(row['lr'] for row in rows))}",
        x="epoch",
        lines=(_line(rows, "lr", "learning rate", "plain"),),
        low=0,
    )


def watched(rows: Rows, part: str, measure: Measure, level: tuple[str, float] | None) -> Lines:
    """One measure of a part, train or val, over the epochs of a run; `level` is a reference, by name."""
    line = _line(rows, f"{part}_{measure.name}", *_PARTS[part])
    across = line.x if len(line.x) > 1 else np.array([0.0, line.x[-1]])  # a single epoch would be a point
    dashed = [] if level is None else [Line(level[0], across, np.full_like(across, level[1]), "plain", dashed=True)]
    return Lines(
        name="curves",
        title=measure.heading or measure.title,
        note=f"{measure.text(float(line.y[-1]))} in the last epoch",
        help=f"{measure.meaning[:1].upper()}{measure.meaning[1:]}.",
        x="epoch",
        lines=(line, *dashed),
        percent=measure.percent,
        low=None if measure.percent else 0,
    )


def together(runs: Mapping[str, Rows], main: Measure) -> list[Lines]:
    """The main validation measure and loss of several runs, by epoch and by time."""
    charts = (overlaid(runs, main), overlaid(runs, main, "minutes"), overlaid(runs, _LOSS))
    return [chart for chart in charts if chart is not None]


def overlaid(runs: Mapping[str, Rows], measure: Measure, by: Literal["epoch", "minutes"] = "epoch") -> Lines | None:
    """A validation measure of several runs; None if no run has it."""
    column, x, scale = f"val_{measure.name}", *(("epoch", 1) if by == "epoch" else ("seconds", 60))
    lines = tuple(
        _line(rows, column, name, run, x=x, scale=scale)
        for run, (name, rows) in enumerate(runs.items())
        if rows and column in rows[0]
    )
    if not lines:
        return None
    return Lines(
        name="runs",
        title=measure.heading or measure.title,
        note=f"validation of {count(len(runs), 'run')} by {'epoch' if by == 'epoch' else 'time'}",
        x=by,
        lines=lines,
        percent=measure.percent,
        low=0 if measure.name == _LOSS.name else None,
    )


def lr_range(lrs: ArrayLike, losses: ArrayLike, smoothed: ArrayLike, suggestion: float) -> Lines:
    """The training loss over an increasing learning rate, marked where it falls fastest."""
    x, every, curve = _values(lrs), _values(losses), _values(smoothed)
    span = float(curve.max() - curve.min())
    height = float(np.interp(math.log(suggestion), np.log(x), curve))
    return Lines(
        name="lr",
        title="Learning-rate range test",
        note=f"loss falls fastest at {suggestion:g}, lowest at {x[curve.argmin()]:.2g}; {count(len(every), 'step')}",
        x="learning rate",
        y="training loss",
        lines=(
            Line("per step", x, every, "pale"),
            Line("smoothed", x, curve, dot=(suggestion, height)),
        ),
        log=True,
        low=float(curve.min()) - 0.1 * span,  # the loss may diverge in the last steps
        high=float(curve.max()) + 0.1 * span,
        mark=suggestion,
    )


def _line(
    rows: Rows,
    column: str,
    name: str,
    tone: Tone,
    *,
    x: str = "epoch",
    scale: float = 1,
    dot: tuple[float, float] | None = None,
) -> Line:
    return Line(name, _column(rows, x) / scale, _column(rows, column), tone, dot=dot)


def _column(rows: Rows, name: str) -> Values:
    return _values([row[name] for row in rows])


def _values(numbers: ArrayLike) -> Values:
    return np.asarray(numbers, np.float64)


# Classes --------------------------------------------------------------------------------------------------


def confusion(counts: NDArray[np.integer], names: Sequence[str]) -> Matrix:
    """The confusion matrix, (K, K), with true classes in rows and predicted ones in columns."""
    images = int(counts.sum())
    return Matrix(
        name="confusion",
        title="Confusion matrix",
        note=f"top-1 accuracy {percent(int(counts.trace()) / max(images, 1))}, {count(images)}",
        help="Rows are true classes, columns predicted ones. The shade is the share of the true class.",
        names=tuple(names),
        counts=counts.astype(np.int64),
        totals=counts.sum(axis=1).astype(np.int64),
    )


def reliability(
    bins: Sequence[tuple[float, float, int]],
    x: str = "confidence in the predicted class",
    y: str = "accuracy",
    things: str = "images",
) -> Reliability:
    """The reliability diagram of bins of (mean confidence, accuracy, count)."""
    total = max(sum(n for _, _, n in bins), 1)
    error = sum(n * abs(accuracy - confidence) for confidence, accuracy, n in bins) / total
    off = sum(n * (confidence - accuracy) for confidence, accuracy, n in bins) / total
    return Reliability(
        name="reliability",
        title="Reliability",
        note=f"calibration error {percent(error)}, {lean(off)}",
        help="Bars on the diagonal are perfectly calibrated; below it predictions are overconfident.",
        bins=tuple((float(confidence), float(accuracy), int(n)) for confidence, accuracy, n in bins),
        x=x,
        y=y,
        things=things,
    )


def shots(
    numbers: Sequence[int], top1: Sequence[Sequence[float]], mean: ArrayLike, std: ArrayLike, images: int
) -> ErrorBars:
    """Few-shot accuracy by training images per class: every draw, means and standard deviations."""
    order = np.argsort(numbers)
    draws = max(map(len, top1))
    what = f"mean and standard deviation of {draws} draws" if draws > 1 else "one draw"
    return ErrorBars(
        name="shots",
        title="Few-shot accuracy",
        note=f"{what}, {count(images)}",
        x="training images per class",
        y="top-1",
        at=_values(numbers)[order],
        each=tuple(_values(top1[i]) for i in order),
        mean=_values(mean)[order],
        std=_values(std)[order],
    )


# Labels ---------------------------------------------------------------------------------------------------


def average_precision(names: Sequence[str], ap: Sequence[float | None], support: Sequence[int], images: int) -> Bars:
    """Average precision of every label, highest first, with chance level; labels without images are omitted."""
    found = {k: value for k, value in enumerate(ap) if value is not None}
    known = sorted(found, key=found.__getitem__, reverse=True)
    values = _values([found[k] for k in known])
    return Bars(
        name="average_precision",
        title="Average precision",
        note=f"mean {percent(values.mean() if len(values) else 0.0)}, {count(len(known), 'label')}, {count(images)}",
        help="Ticks mark chance level: the share of images with the label.",
        x="average precision",
        names=tuple(names[k] for k in known),
        values=values,
        tick="chance",
        ticks=_values([support[k] for k in known]) / max(images, 1),
    )


def precision_recall(
    targets: NDArray[np.number],
    probabilities: NDArray[np.floating],
    names: Sequence[str],
    thresholds: Sequence[float],
) -> Lines:
    """Precision-recall curves of targets and probabilities (N, K): of every label, the weakest, and the micro-average.

    Dots are the labels at their thresholds. Labels without images are omitted.
    """
    true = targets > 0.5
    lines = list(_label_lines(true, probabilities, names, thresholds))
    f1 = [2 * p * r / max(p + r, 1e-12) for r, p in (line.dot for line in lines if line.dot)]
    if lines:
        lines.append(Line("micro-average", *_precision_recall(true.ravel(), probabilities.ravel())))
    return Lines(
        name="precision_recall",
        title="Precision and recall",
        note=f"macro F1 {percent(float(np.mean(f1)) if f1 else 0.0)} at the thresholds (dots)",
        help="Lowering the threshold raises recall and usually lowers precision.",
        x="recall",
        y="precision",
        lines=tuple(lines),
        percent=True,
        square=True,
    )


def _label_lines(
    true: NDArray[np.bool_], probabilities: NDArray[np.floating], names: Sequence[str], thresholds: Sequence[float]
) -> Iterator[Line]:
    """A line for every label with images; the weakest is highlighted, unless it is the only one."""
    known = np.flatnonzero(true.any(axis=0))
    curves = {int(k): _precision_recall(true[:, k], probabilities[:, k]) for k in known}
    ap = {k: -float(np.sum(np.diff(recall) * precision[:-1])) for k, (recall, precision) in curves.items()}
    weakest = min(ap, key=ap.__getitem__) if len(ap) > 1 else None
    for k, (recall, precision) in curves.items():
        given = probabilities[:, k] >= thresholds[k]
        hits = int((given & true[:, k]).sum())
        dot = hits / int(true[:, k].sum()), hits / max(int(given.sum()), 1)
        name, tone = (f"{names[k]}, the weakest", "warm") if k == weakest else ("each label", "pale")
        yield Line(name, recall, precision, tone, steps=True, dot=dot)  # type: ignore[arg-type]


def _precision_recall(true: NDArray[np.bool_], probabilities: NDArray[np.floating]) -> tuple[Values, Values]:
    """Recall, descending from 1 to 0, and precision."""
    from sklearn.metrics import precision_recall_curve  # slow to import

    precision, recall, _ = precision_recall_curve(true, probabilities)
    return _values(recall), _values(precision)


# Numbers --------------------------------------------------------------------------------------------------


def predicted(
    names: Sequence[str],
    true: NDArray[np.floating],
    predicted: NDArray[np.floating],
    r2: Sequence[float],
    mae: Sequence[float],
    rmse: Sequence[float],
) -> list[Scatter]:
    """Predicted against true values, (N, K), one plot per value; at most six, those with the lowest R²."""
    worst = sorted(range(len(names)), key=lambda k: r2[k])[:_COLUMNS]
    return [
        Scatter(
            name="predicted",
            title=names[k],
            note=f"R² {number(r2[k])}, MAE {number(mae[k])}, RMSE {number(rmse[k])}",
            help="Points on the line are perfect predictions.",
            true=_values(true[:, k]),
            predicted=_values(predicted[:, k]),
        )
        for k in sorted(worst)
    ]


# Attention ------------------------------------------------------------------------------------------------


def distance(
    values: NDArray[np.floating], even: ArrayLike, width: int, images: int, uniform: str = "uniform attention"
) -> Heads:
    """Mean attention distance of every head by layer, (L, H), with NaN where a layer has fewer heads.

    `even`, (L,), is the distance of uniform attention. Distances are in pixels of an image of this `width`.
    """
    layers = tuple(_values(heads[np.isfinite(heads)]) for heads in values)
    first, last = layers[0].mean(), layers[-1].mean()
    return Heads(
        name="distance",
        title="Attention distance",
        note=f"{first:.1f} px in the first layer, {last:.1f} px in the last; mean over {count(images)}",
        help="Each dot is a head: the mean distance of the patches it attends to, weighted by attention.",
        layers=layers,
        even=_values(even),
        uniform=uniform,
        width=width,
    )
