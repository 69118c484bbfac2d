"""Draws charts with matplotlib, one function per kind."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial, singledispatch
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure, FigureBase
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, PercentFormatter

from vitrail.charts.kinds import Bars, Chart, ErrorBars, Heads, Line, Lines, Matrix, Reliability, Scatter, Series, Tone
from vitrail.charts.style import BLUE, GREY, INK, ORANGE, RUNS, SHADES, SKY, heading, save, short, styled
from vitrail.files import atomic_write

COUNTED = 20  # maximum classes of a confusion matrix with counts in its cells
NAMED = 100  # maximum names on an axis
_ACROSS = 4  # charts in a row
_TICKS = 6  # values named on a logarithmic axis; of more, these multiples of powers of ten
_LOG = (1, 2, 4)
_DASHED = (0, (4, 3))


@styled
def draw(*charts: Chart) -> Figure:
    """Draws one chart, or several of one kind side by side, in two rows if they are many."""
    if len(charts) == 1:
        figure = Figure(figsize=_size(charts[0], alone=True), layout="constrained")
        _draw(charts[0], figure)
        return figure
    rows = 1 if len(charts) <= _ACROSS else 2
    across = math.ceil(len(charts) / rows)
    sizes = [_size(chart, alone=False) for chart in charts]
    widths = [max(w for w, _ in sizes[column::across]) for column in range(across)]
    height = max(h for _, h in sizes)
    figure = Figure(figsize=(sum(widths), rows * height), layout="constrained")
    panels = figure.subfigures(rows, across, squeeze=False, width_ratios=widths)
    for chart, panel in zip(charts, panels.flat, strict=False):  # the last panel may stay empty
        _draw(chart, panel)
    if len({chart.y for chart in charts if isinstance(chart, Series)}) == 1:  # they can be compared
        low, high = zip(*(axes.get_ylim() for axes in figure.axes), strict=True)
        for axes in figure.axes:
            axes.set_ylim(min(low), max(high))
    return figure


def save_charts(charts: Iterable[Chart], folder: Path) -> None:
    """Writes charts to PNG files in a folder; charts of the same name share a file."""
    files: dict[str, list[Chart]] = {}
    for chart in charts:
        files.setdefault(chart.name, []).append(chart)
    for name, group in files.items():
        with atomic_write(folder / f"{name}.png") as path:
            save(draw(*group), path)


@singledispatch
def _draw(chart: Chart, panel: FigureBase) -> None:
    raise NotImplementedError(type(chart))


_SIZES = {Reliability: (4.6, 5.4), Scatter: (3.9, 5.2), Heads: (6.8, 4.2), ErrorBars: (5.0, 3.6), Series: (6.0, 4.2)}


def _size(chart: Chart, alone: bool) -> tuple[float, float]:
    """Width and height in inches."""
    if isinstance(chart, Lines):
        return (5.4, 4.6) if chart.square else (6.4, 3.8) if alone else (3.7, 3.5)
    if isinstance(chart, Bars):
        return 6.4, max(0.24 * min(len(chart.names), NAMED), 1) + 1.2
    if isinstance(chart, Matrix):
        cell, size, longest = _cells(chart)
        side, margin = cell * min(len(chart.names), NAMED), longest * size / 120 + 0.5
        return side + margin + 1, side + margin + 0.5
    return _SIZES[type(chart)]


def _percent(*axes: Axes, x: bool = True, y: bool = True) -> None:
    for each in axes:
        for axis in [each.xaxis] * x + [each.yaxis] * y:
            axis.set_major_formatter(PercentFormatter(1, decimals=0))


# Lines ----------------------------------------------------------------------------------------------------


@_draw.register
def _(chart: Lines, panel: FigureBase) -> None:
    axes = panel.add_subplot()
    heading(axes, chart.title, chart.note)
    named: set[str] = set()
    for line in chart.lines:
        _line(axes, line, "" if line.name in named else short(line.name, 40))
        named.add(line.name)
    if chart.mark is not None:
        axes.axvline(chart.mark, color=ORANGE, linewidth=1, linestyle="--")
    if len(named) > 1:
        axes.legend(loc="lower left" if chart.square else "best", fontsize=8)
    axes.set(xlabel=chart.x, ylabel=chart.y)
    if chart.log:
        axes.set_xscale("log")
    elif chart.square:
        axes.set(xlim=(0, 1.02), ylim=(0, 1.02))
        _percent(axes)
    else:
        axes.set_xlim(0, 1.03 * max(float(line.x[-1]) for line in chart.lines))
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
        axes.grid(axis="x", visible=False)
        axes.yaxis.set_major_locator(MaxNLocator(6))
        axes.yaxis.set_major_formatter((lambda y, _: f"{100 * y:g}%") if chart.percent else (lambda y, _: f"{y:g}"))
    axes.set_ylim(chart.low, chart.high)


def _line(axes: Axes, line: Line, label: str) -> None:
    tone = _colour(line.tone)
    pale = line.tone == "pale"
    axes.plot(
        line.x,
        line.y,
        color=tone,
        linewidth=0.9 if pale else None,
        zorder=2 if pale else 3,
        marker="o" if len(line.x) < 3 and not line.dashed else None,  # too few points for a line
        drawstyle="steps-post" if line.steps else None,
        linestyle=_DASHED if line.dashed else None,
        label=label or "_",  # a leading underscore hides it from the legend
    )
    if line.dot is not None:
        axes.plot(*line.dot, "o", color=tone, markeredgecolor="white", markersize=6 if pale else 8, zorder=4)


def _colour(tone: Tone) -> str:
    if isinstance(tone, int):
        return RUNS[tone % len(RUNS)]
    return {"cool": BLUE, "warm": ORANGE, "plain": GREY, "pale": SKY}[tone]


# Confusion matrix -----------------------------------------------------------------------------------------


def _cells(chart: Matrix) -> tuple[float, float, int]:
    """Cell size in inches, font size of the names, length of the longest name."""
    classes = len(chart.names)
    counted = classes <= COUNTED
    cell = min(max(4 / classes, 0.45), 1.1) if counted else max(9 / classes, 0.115)
    size = 9 if counted else min(max(cell * 52, 5.5), 9)
    return cell, size, max(len(short(name)) for name in chart.names)


@_draw.register
def _(chart: Matrix, panel: FigureBase) -> None:
    axes = panel.add_subplot()
    heading(axes, chart.title, chart.note)
    shares = chart.counts / np.maximum(chart.totals[:, None], 1)
    # Square root of the share, so that 2 % of confusion is visible next to 98 % on the diagonal.
    image = axes.imshow(shares, cmap=SHADES, norm=PowerNorm(0.5, 0, 1), interpolation="nearest")
    _name_classes(axes, chart)
    classes, (cell, *_) = len(chart.names), _cells(chart)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    if classes <= NAMED:  # room for white lines between cells
        edges = np.arange(1, classes) - 0.5
        axes.set_xticks(edges, minor=True)
        axes.set_yticks(edges, minor=True)
        axes.grid(which="minor", color="white", linewidth=1.2 if classes <= COUNTED else 0.5)
        axes.tick_params(which="minor", length=0)
    if classes <= COUNTED:
        size = min(9.0, cell * 72 / (0.75 * len(str(chart.counts.max())) + 0.6))
        for row, column in np.argwhere(chart.counts):
            colour = "white" if shares[row, column] > 0.3 else INK
            text = str(chart.counts[row, column])
            axes.text(column, row, text, ha="center", va="center", fontsize=size, color=colour)
    side = cell * min(classes, NAMED)
    height = min(2.6 / side, 1)
    bar = panel.colorbar(
        image,
        cax=axes.inset_axes((1 + 0.15 / side, 1 - height, 0.16 / side, height)),
        ticks=[0, 0.01, 0.05, 0.1, 0.25, 0.5, 1],
        format=PercentFormatter(1, decimals=0),
    )
    bar.outline.set_visible(False)  # type: ignore[operator]
    bar.ax.tick_params(labelsize=8)
    bar.set_label("share of the true class", fontsize=8)


def _name_classes(axes: Axes, chart: Matrix) -> None:
    _, size, longest = _cells(chart)
    shown = range(0, len(chart.names), math.ceil(len(chart.names) / NAMED))
    labels = [short(chart.names[i]) for i in shown]
    axes.set_yticks(shown, labels, fontsize=size)
    axes.set_xticks(shown, labels, fontsize=size)
    counted = len(chart.names) <= COUNTED
    if longest > (4 if counted else 2):
        turn = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if counted else {"rotation": 90}
        axes.set_xticks(shown, labels, fontsize=size, **turn)
    axes.tick_params(colors=INK)
    axes.set_xlabel("predicted class", labelpad=8)
    axes.set_ylabel("true class", labelpad=8)


# Bars -----------------------------------------------------------------------------------------------------


@_draw.register
def _(chart: Bars, panel: FigureBase) -> None:
    axes = panel.add_subplot()
    shown = chart.lowest(NAMED)
    heading(axes, chart.title, f"{chart.note}{'' if len(chart.names) <= NAMED else f'; the {NAMED} lowest'}")
    rows = np.arange(len(shown.names))
    axes.barh(rows, shown.values, color=SKY, height=0.72)
    axes.plot(shown.ticks, rows, "|", color=INK, markersize=9, label=chart.tick)
    axes.set_yticks(rows, [short(name) for name in shown.names])
    axes.tick_params(axis="y", colors=INK)
    axes.set(xlim=(0, 1), ylim=(len(rows) - 0.4, -0.6), xlabel=chart.x)
    axes.grid(axis="y", visible=False)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), fontsize=8, handletextpad=0.2)
    _percent(axes, y=False)


# Reliability ----------------------------------------------------------------------------------------------


@_draw.register
def _(chart: Reliability, panel: FigureBase) -> None:
    upper, lower = panel.subplots(2, 1, sharex=True, height_ratios=[3.4, 1])
    heading(upper, chart.title, chart.note)
    _, accuracy, counts = np.array(chart.bins).T
    left, width = np.arange(len(counts)) / len(counts), 1 / len(counts)
    upper.bar(left, accuracy, width, align="edge", color=SKY, edgecolor="white")
    upper.plot([0, 1], [0, 1], color=INK, linewidth=1, linestyle=_DASHED, label="perfect calibration")
    upper.legend(loc="upper left", fontsize=8)
    upper.set(xlim=(0, 1), ylim=(0, 1.02), ylabel=chart.y)
    lower.bar(left, counts / max(counts.sum(), 1), width, align="edge", color="#9AA5AE", edgecolor="white")
    lower.set(xlabel=chart.x, ylabel=f"share of {chart.things}")
    lower.yaxis.set_major_locator(MaxNLocator(3, steps=[1, 2, 5, 10], prune="lower"))
    for axes in (upper, lower):
        axes.grid(axis="x", visible=False)
    _percent(upper, lower)


# Scatter --------------------------------------------------------------------------------------------------


@_draw.register
def _(chart: Scatter, panel: FigureBase) -> None:
    """Predicted against true values, with residuals below."""
    upper, lower = panel.subplots(2, 1, sharex=True, height_ratios=[3, 1.4])
    heading(upper, short(chart.title), chart.note)
    true, predicted = chart.true, chart.predicted
    size = float(np.clip(1500 / max(len(true), 1), 2, 18))
    points = {"s": size, "color": BLUE, "alpha": 0.5, "linewidths": 0}
    ends = [min(true.min(), predicted.min()), max(true.max(), predicted.max())]
    upper.plot(ends, ends, color=INK, linewidth=1, linestyle=_DASHED, zorder=1)
    upper.scatter(true, predicted, **points)
    lower.axhline(0, color=INK, linewidth=1, linestyle=_DASHED, zorder=1)
    lower.scatter(true, predicted - true, **points)
    upper.set_ylabel("predicted")
    lower.set(xlabel="true", ylabel="predicted - true")
    for axes, most in ((upper, 5), (lower, 4)):
        axes.yaxis.set_major_locator(MaxNLocator(most))
        axes.xaxis.set_major_locator(MaxNLocator(5))


# Attention distance ---------------------------------------------------------------------------------------


@_draw.register
def _(chart: Heads, panel: FigureBase) -> None:
    """As in figure 7 (right) of the ViT paper."""
    axes = panel.add_subplot()
    heading(axes, chart.title, chart.note)
    depth = len(chart.layers)
    layers = np.arange(1, depth + 1)
    edges = np.arange(depth + 1) + 0.5
    axes.stairs(chart.even, edges, baseline=None, color=GREY, linewidth=1, linestyle=_DASHED, label=chart.uniform)
    axes.plot(layers, [heads.mean() for heads in chart.layers], color=ORANGE, linewidth=1.6, label="layer mean")
    far = np.concatenate(chart.layers)
    where = layers.repeat([len(heads) for heads in chart.layers])
    axes.scatter(where, far, s=26, color=BLUE, alpha=0.75, linewidths=0, zorder=3, label="head")
    axes.set(xlabel="layer", ylabel="mean attention distance (pixels)", xlim=(0.5, depth + 0.5))
    axes.set_ylim(0, 1.12 * max(float(far.max()), float(chart.even.max())))
    axes.xaxis.set_major_locator(MaxNLocator(min(depth, 12), integer=True))
    axes.grid(axis="x", visible=False)
    scale = partial(np.multiply, 1 / chart.width), partial(np.multiply, chart.width)
    share = axes.secondary_yaxis("right", functions=scale)
    share.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    share.set_ylabel("share of image width")
    axes.legend(loc="best", fontsize=8)


# Error bars -----------------------------------------------------------------------------------------------


@_draw.register
def _(chart: ErrorBars, panel: FigureBase) -> None:
    axes = panel.add_subplot()
    heading(axes, chart.title, chart.note)
    where = chart.at.repeat([len(each) for each in chart.each])
    axes.scatter(where, np.concatenate(chart.each), s=18, color=SKY, linewidths=0)
    axes.errorbar(
        chart.at, chart.mean, chart.std, color=BLUE, marker="o", markersize=5, elinewidth=0.8, capsize=3, zorder=3
    )
    axes.set_xscale("log")
    axes.set_xticks(chart.at, [f"{at:,.0f}" for at in chart.at])
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set(xlabel=chart.x, ylabel=chart.y)


# Series ---------------------------------------------------------------------------------------------------


@_draw.register
def _(chart: Series, panel: FigureBase) -> None:
    axes = panel.add_subplot()
    heading(axes, chart.title, chart.note)
    # Points that are not joined are beside each other, or they would hide each other.
    beside = chart.names and len(chart.series) > 1 and not any(points.joined for points in chart.series)
    places = np.linspace(-0.24, 0.24, len(chart.series)) if beside else np.zeros(len(chart.series))
    for points, place in zip(chart.series, places, strict=True):
        colour = RUNS[points.tone % len(RUNS)]
        if points.dashed:
            axes.plot(points.x, points.y, color=colour, linestyle=_DASHED, linewidth=1.2, label=short(points.name, 40))
            continue
        # A wide interval must not flatten the other series.
        axes.errorbar(
            points.x + place,
            points.y,
            np.nan_to_num(np.abs(np.stack([points.y - points.low, points.high - points.y]))),
            color=colour,
            marker="o",
            markersize=5,
            linestyle="-" if points.joined else "none",
            elinewidth=0.9,
            capsize=2.5,
            label=short(points.name, 40),
        )
    if chart.log:
        axes.set_xscale("log")
        at = sorted({float(x) for points in chart.series for x in points.x})
        axes.xaxis.set_major_locator(FixedLocator(at) if len(at) <= _TICKS else LogLocator(subs=_LOG))
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.6g}")
        axes.set_xticks([], minor=True)
    elif all(float(x).is_integer() for points in chart.series for x in points.x):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if chart.names:
        many = max(map(len, chart.names)) * len(chart.names) > 60
        axes.set_xticks(range(len(chart.names)), [short(name) for name in chart.names])
        if many:
            axes.tick_params(axis="x", rotation=30)
            for label in axes.get_xticklabels():
                label.set(horizontalalignment="right", rotation_mode="anchor")
        axes.set_xlim(-0.4, len(chart.names) - 0.6)
    if chart.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set(xlabel=chart.x, ylabel=chart.y)
    if len(chart.series) > 1:
        axes.legend(loc="best", fontsize=8)
