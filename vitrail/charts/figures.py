"""The figures of a run: training curves, and those of its task, in one style."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import ParamSpec

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager
from matplotlib.ticker import MaxNLocator, PercentFormatter

from vitrail.evaluate.metrics import BINS, AnyMetrics, LabelMetrics, Metrics, ValueMetrics
from vitrail.evaluate.probes import FewShotMetrics, ProbeMetrics

P = ParamSpec("P")

# Two colours of Okabe and Ito, which every kind of colour vision tells apart, and greys.
BLUE, ORANGE = "#0072B2", "#D55E00"
INK, GREY, PALE = "#222222", "#6B6B6B", "#E4E4E4"
SKY = "#6AAED6"
SHADES = LinearSegmentedColormap.from_list(
    "vitrail", [(0, "#F5F6F8"), (0.05, "#DCEAF4"), (0.3, SKY), (0.65, BLUE), (1, "#06365C")]
)

# DejaVu comes with matplotlib; Chinese, Japanese and Korean class names need a font that the system may have.
_EASTERN = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "WenQuanYi Micro Hei",
    "Microsoft YaHei",
    "Arial Unicode MS",
)

STYLE = {
    "font.family": ["DejaVu Sans", *(name for name in _EASTERN if name in fontManager.get_font_names())],
    "font.size": 9,
    "text.color": INK,
    "text.parse_math": False,  # a class may be called $5
    "axes.edgecolor": GREY,
    "axes.labelcolor": GREY,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlepad": 24,
    "grid.color": PALE,
    "grid.linewidth": 0.7,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
}

COUNTED = 20  # classes up to which the cells hold their counts
NAMED = 100  # classes up to which every one is named


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Draws in the style of vitrail's figures."""

    @wraps(draw)
    def styled(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with mpl.rc_context(STYLE):
            return draw(*args, **kwargs)

    return styled


def drawings(metrics: AnyMetrics | ProbeMetrics | FewShotMetrics) -> dict[str, Callable[[], Figure]]:
    """The figures of an evaluation, by the names of their files."""
    if isinstance(metrics, LabelMetrics):
        return {
            "average_precision": partial(average_precision, metrics),
            "precision_recall": partial(precision_recall, metrics),
        }
    if isinstance(metrics, ValueMetrics):
        return {"predicted": partial(predicted, metrics)}
    if isinstance(metrics, FewShotMetrics):
        return {"shots": partial(shots, metrics)}
    if isinstance(metrics, ProbeMetrics):
        return {"confusion": partial(confusion, metrics)}
    return {"confusion": partial(confusion, metrics), "reliability": partial(reliability, metrics)}


@styled
def confusion(metrics: Metrics | ProbeMetrics) -> Figure:
    """True classes in rows, predicted ones in columns; the colour is the share of the row."""
    counts = metrics.confusion
    classes = len(counts)
    counted = classes <= COUNTED
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    names = [short(score.name) for score in metrics.per_class]
    longest = max(map(len, names))

    cell = min(max(4 / classes, 0.45), 1.1) if counted else max(9 / classes, 0.115)  # inches
    side = cell * min(classes, NAMED)
    size = 9 if counted else min(max(cell * 52, 5.5), 9)  # points
    margin = longest * size / 120 + 0.5
    figure = Figure(figsize=(side + margin + 1, side + margin + 0.5), layout="constrained")
    axes = figure.add_subplot()
    # By the square root of the share: a confusion of 2 % must be seen beside a diagonal of 98 %.
    image = axes.imshow(shares, cmap=SHADES, norm=PowerNorm(0.5, 0, 1), interpolation="nearest")
    heading(axes, f"Top-1 accuracy {metrics.top1:.1%}", f"confusion of {metrics.images:,} images")

    shown = range(0, classes, math.ceil(classes / NAMED))
    labels = [names[i] for i in shown]
    axes.set_yticks(shown, labels, fontsize=size)
    axes.set_xticks(shown, labels, fontsize=size)
    if longest > (4 if counted else 2):
        turn = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if counted else {"rotation": 90}
        axes.set_xticks(shown, labels, fontsize=size, **turn)
    axes.tick_params(colors=INK)
    axes.set_xlabel("predicted class", labelpad=8)
    axes.set_ylabel("true class", labelpad=8)

    # White lines part the cells, as far as there is room for them.
    axes.grid(False)
    axes.spines[:].set_visible(False)
    if classes <= NAMED:
        edges = np.arange(1, classes) - 0.5
        axes.set_xticks(edges, minor=True)
        axes.set_yticks(edges, minor=True)
        axes.grid(which="minor", color="white", linewidth=1.2 if counted else 0.5)
        axes.tick_params(which="minor", length=0)
    if counted:
        fitting = min(9.0, cell * 72 / (0.75 * len(str(counts.max())) + 0.6))
        for row, column in np.argwhere(counts):
            colour = "white" if shares[row, column] > 0.3 else INK
            text = str(counts[row, column])
            axes.text(column, row, text, ha="center", va="center", fontsize=fitting, color=colour)

    height = min(2.6 / side, 1)
    bar = figure.colorbar(
        image,
        cax=axes.inset_axes((1 + 0.15 / side, 1 - height, 0.16 / side, height)),
        ticks=[0, 0.01, 0.05, 0.1, 0.25, 0.5, 1],
        format=PercentFormatter(1, decimals=0),
    )
    bar.outline.set_visible(False)  # type: ignore[operator]
    bar.ax.tick_params(labelsize=8)
    bar.set_label("share of the true class", fontsize=8)
    return figure


@styled
def reliability(metrics: Metrics) -> Figure:
    """How often the model is right at each confidence, and how often it is so confident."""
    figure = Figure(figsize=(4.6, 5.4), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3.4, 1])
    left = np.arange(BINS) / BINS
    bars = {"width": 1 / BINS, "align": "edge", "edgecolor": "white"}
    confidence = sum(b.count * b.confidence for b in metrics.bins) / metrics.images
    note = f"top-1 {metrics.top1:.1%}, mean confidence {confidence:.1%}, {metrics.images:,} images"
    heading(upper, f"Calibration error {metrics.ece:.1%}", note)
    upper.bar(left, [b.accuracy for b in metrics.bins], color=SKY, **bars)
    upper.plot([0, 1], [0, 1], color=INK, linewidth=1, linestyle=(0, (4, 3)), label="perfect calibration")
    upper.legend(loc="upper left", fontsize=8)
    upper.set(xlim=(0, 1), ylim=(0, 1.02), ylabel="accuracy")
    lower.bar(left, [b.count / metrics.images for b in metrics.bins], color="#9AA5AE", **bars)
    lower.set(xlabel="confidence in the predicted class", ylabel="share of images")
    lower.yaxis.set_major_locator(MaxNLocator(3, steps=[1, 2, 5, 10], prune="lower"))
    for axes in (upper, lower):
        axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.grid(axis="x", visible=False)
    return figure


@styled
def shots(metrics: FewShotMetrics) -> Figure:
    """Accuracy over the number of training images per class: every draw, their mean and standard deviation."""
    figure = Figure(figsize=(5, 3.6), layout="constrained")
    axes = figure.add_subplot()
    results = sorted(metrics.shots, key=lambda result: result.shots)
    numbers = [result.shots for result in results]
    means, spreads = [result.mean for result in results], [result.std for result in results]
    axes.scatter(
        [result.shots for result in results for _ in result.top1],
        [value for result in results for value in result.top1],
        s=18,
        color=SKY,
        linewidths=0,
        zorder=3,
    )
    axes.errorbar(numbers, means, spreads, color=BLUE, marker="o", markersize=5, elinewidth=0.8, capsize=3)
    axes.set_xscale("log")
    axes.set_xticks(numbers, [f"{number:,}" for number in numbers])
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_xlabel("training images per class")
    axes.set_ylabel("top-1")
    draws = f"mean and standard deviation of {metrics.draws} draws" if metrics.draws > 1 else "one draw"
    heading(axes, "Few-shot accuracy", f"{draws}, {metrics.images:,} images")
    return figure


@styled
def average_precision(metrics: LabelMetrics) -> Figure:
    """Average precision of every label, best first, beside what guessing would reach."""
    scores = sorted((s for s in metrics.per_label if s.ap is not None), key=lambda s: -(s.ap or 0))
    worst = f", the {NAMED} lowest" if len(scores) > NAMED else ""
    scores = scores[-NAMED:]
    height = max(0.24 * len(scores), 1) + 1.2
    figure = Figure(figsize=(6.4, height), layout="constrained")
    axes = figure.add_subplot()
    known = len(metrics.per_label) - len(metrics.unseen)
    heading(axes, f"Mean average precision {metrics.map:.1%}", f"{known} labels{worst}, {metrics.images:,} images")
    rows = np.arange(len(scores))
    axes.barh(rows, [s.ap or 0.0 for s in scores], color=SKY, height=0.72)
    chance = [s.support / metrics.images for s in scores]  # a random order finds labels as often as they are there
    axes.plot(chance, rows, "|", color=INK, markersize=9, label="chance")
    axes.set_yticks(rows, [short(s.name) for s in scores])
    axes.tick_params(axis="y", colors=INK)
    axes.set(xlim=(0, 1), ylim=(len(scores) - 0.4, -0.6), xlabel="average precision")
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.grid(axis="y", visible=False)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), fontsize=8, handletextpad=0.2)
    return figure


@styled
def precision_recall(metrics: LabelMetrics) -> Figure:
    """How many of the labels given are right, against how many are found, as the threshold falls."""
    from sklearn.metrics import precision_recall_curve

    figure = Figure(figsize=(5.4, 4.6), layout="constrained")
    axes = figure.add_subplot()
    heading(axes, f"F1 {metrics.macro_f1:.1%}", "mean over labels, each at its threshold: the dots")
    scores = [(k, s) for k, s in enumerate(metrics.per_label) if s.ap is not None]
    worst = min(scores, key=lambda score: score[1].ap or 0, default=None)
    for k, score in scores:
        precision, recall, _ = precision_recall_curve(metrics.targets[:, k] > 0.5, metrics.probabilities[:, k])
        last = worst is not None and k == worst[0] and len(scores) > 1
        style = {"color": ORANGE, "linewidth": 1.8, "zorder": 3} if last else {"color": SKY, "linewidth": 1.0}
        name = f"{short(score.name)}, the lowest: {score.ap:.1%}" if last else None
        axes.plot(recall, precision, drawstyle="steps-post", label=name, **style)  # type: ignore[arg-type]
        axes.plot(
            score.recall, score.precision, "o", color=style["color"], markeredgecolor="white", markersize=6, zorder=4
        )
    if scores:
        precision, recall, _ = precision_recall_curve(metrics.targets.ravel() > 0.5, metrics.probabilities.ravel())
        axes.plot(recall, precision, color=BLUE, linewidth=2.2, zorder=5, label="all labels as one")
    axes.plot([], [], color=SKY, linewidth=1.0, label="each label")
    axes.legend(loc="lower left", fontsize=8)
    axes.set(xlim=(0, 1.02), ylim=(0, 1.02), xlabel="recall", ylabel="precision")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PercentFormatter(1, decimals=0))
    return figure


@styled
def predicted(metrics: ValueMetrics, most: int = 6) -> Figure:
    """Predicted against true values of each column, and below them how far off they are."""
    order = sorted(range(len(metrics.per_value)), key=lambda k: metrics.per_value[k].r2)
    columns = sorted(order[:most])  # if they are too many, those that fit worst
    figure = Figure(figsize=(3.9 * len(columns), 5.2), layout="constrained")
    grid = figure.subplots(2, len(columns), sharex="col", height_ratios=[3, 1.4], squeeze=False)
    size = float(np.clip(1500 / metrics.images, 2, 18))
    for (upper, lower), k in zip(grid.T, columns, strict=True):
        score, true, said = metrics.per_value[k], metrics.targets[:, k], metrics.predicted[:, k]
        heading(upper, f"{short(score.name)}: R² {score.r2:.3f}", f"MAE {score.mae:.3g}, RMSE {score.rmse:.3g}")
        points = {"s": size, "color": BLUE, "alpha": 0.5, "linewidths": 0}
        ends = [float(min(true.min(), said.min())), float(max(true.max(), said.max()))]
        upper.plot(ends, ends, color=INK, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        upper.scatter(true, said, **points)
        lower.axhline(0, color=INK, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        lower.scatter(true, said - true, **points)
        upper.set_ylabel("predicted")
        lower.set(xlabel="true", ylabel="predicted - true")
        for axes in (upper, lower):
            axes.yaxis.set_major_locator(MaxNLocator(5 if axes is upper else 4))
            axes.xaxis.set_major_locator(MaxNLocator(5))
    return figure


_MAIN = {"top1": "Top-1 accuracy", "map": "Mean average precision", "r2": "R²"}  # what a run is best by


@styled
def curves(rows: Sequence[Mapping[str, float]]) -> Figure:
    """Loss, the main metric and learning rate over the epochs of a run, from the rows of its metrics.csv."""
    figure = Figure(figsize=(11, 3.5), layout="constrained")
    loss, main, lr = figure.subplots(1, 3, width_ratios=[3, 3, 2], gridspec_kw={"wspace": 0.08})
    column = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    name = next(name for name in _MAIN if f"val_{name}" in column)
    scores = column[f"val_{name}"]
    epoch, best = column["epoch"], int(np.nanargmax(scores))
    marker = "o" if len(rows) < 3 else None  # a point is no line

    for part, title, colour in (("train", "training", ORANGE), ("val", "validation", BLUE)):
        loss.plot(epoch, column[f"{part}_loss"], color=colour, marker=marker, label=title)
        if f"{part}_{name}" in column:
            main.plot(epoch, column[f"{part}_{name}"], color=colour, marker=marker)
    main.plot(epoch[best], scores[best], "o", color=BLUE, markeredgecolor="white", markersize=8)
    lr.plot(epoch, column["lr"], color=GREY, marker=marker)

    heading(loss, "Loss", f"validation ends at {column['val_loss'][-1]:.3f}")
    shown = f"{scores[best]:.3f}" if name == "r2" else f"{scores[best]:.1%}"
    heading(main, _MAIN[name], f"validation is best in epoch {epoch[best]:g}: {shown}")
    heading(lr, "Learning rate", f"highest {column['lr'].max():.3g}")
    loss.legend()
    loss.set_ylim(bottom=0)
    lr.set_ylim(bottom=0)
    lr.yaxis.set_major_locator(MaxNLocator(4))
    lr.yaxis.set_major_formatter("{x:g}")
    if name != "r2":
        main.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g}%")
    for axes in (loss, main, lr):
        axes.set_xlabel("epoch")
        axes.set_xlim(0, 1.03 * epoch[-1])
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
        axes.grid(axis="x", visible=False)
    return figure


@styled
def lr_range(lrs: Sequence[float], losses: Sequence[float], smoothed: Sequence[float], suggestion: float) -> Figure:
    """The loss while the learning rate grows, and where it falls fastest."""
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.add_subplot()
    height = float(np.interp(math.log(suggestion), np.log(lrs), smoothed))
    axes.plot(lrs, losses, color=SKY, linewidth=0.8, alpha=0.8, label="every step")
    axes.plot(lrs, smoothed, color=BLUE, label="smoothed")
    axes.axvline(suggestion, color=ORANGE, linewidth=1, linestyle="--")
    axes.plot([suggestion], [height], "o", color=ORANGE, markersize=6)
    axes.annotate(
        f"falls fastest at {suggestion:g}",
        (suggestion, 1),
        (8, -2),
        xycoords=axes.get_xaxis_transform(),
        textcoords="offset points",
        va="top",
        color=ORANGE,
    )
    axes.set_xscale("log")
    axes.set_xlabel("learning rate")
    axes.set_ylabel("training loss")
    span = max(smoothed) - min(smoothed)
    axes.set_ylim(min(smoothed) - 0.1 * span, max(smoothed) + 0.1 * span)  # a last step may be far off
    axes.legend(loc="best")
    heading(
        axes, "Learning-rate range test", f"{len(losses)} steps, lowest loss at {lrs[int(np.argmin(smoothed))]:.2g}"
    )
    return figure


def save(figure: Figure, path: Path, format: str = "png") -> None:
    """Writes a figure as PNG, SVG or PDF, trimmed to what is drawn."""
    with warnings.catch_warnings():
        # A class name in a script that no font has is drawn as boxes: ugly, but nothing that is wrong.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure.savefig(path, format=format, dpi=150, bbox_inches="tight", facecolor="white")


def heading(axes: Axes, title: str, note: str) -> None:
    """A title, and below it what it is about in grey."""
    axes.set_title(title)
    axes.annotate(note, (0, 1), (0, 8), xycoords="axes fraction", textcoords="offset points", color=GREY)


def short(name: str, longest: int = 30) -> str:
    """A long name without its middle: the two ends tell more names apart than the beginning alone."""
    half = (longest - 1) // 2
    return name if len(name) <= longest else f"{name[:half].rstrip(' ._-')}…{name[-half:].lstrip(' ._-')}"
