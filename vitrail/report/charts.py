"""Reduces charts to the classes, lines and points that a page has room for."""

from __future__ import annotations

from dataclasses import replace
from functools import singledispatch

import numpy as np

from vitrail.charts.kinds import Bars, Chart, Line, Lines, Matrix, Scatter

CELLS = 50  # classes in a confusion matrix
BARS = 50
LINES, STOPS = 12, 150  # lines per chart, points per line
POINTS = 1500  # in a scatter plot


@singledispatch
def fit(chart: Chart) -> Chart:
    """The chart, reduced to what a page has room for; its `help` then names the selection."""
    return chart


@fit.register
def _(chart: Matrix) -> Chart:
    """Selects the classes confused most."""
    if len(chart.names) <= CELLS:
        return chart
    wrong = chart.counts - np.diag(chart.counts.diagonal())
    most = np.sort(np.argsort(-(wrong.sum(axis=0) + wrong.sum(axis=1)), kind="stable")[:CELLS])
    return replace(
        chart,
        names=tuple(chart.names[i] for i in most),
        counts=chart.counts[np.ix_(most, most)],
        totals=chart.totals[most],
        help=f"The {CELLS} most confused of {len(chart.names)} classes. {chart.help}",
    )


@fit.register
def _(chart: Bars) -> Chart:
    """Selects the lowest bars."""
    if len(chart.names) <= BARS:
        return chart
    return replace(chart.lowest(BARS), help=f"The {BARS} lowest of {len(chart.names)}. {chart.help}")


@fit.register
def _(chart: Lines) -> Chart:
    """Selects the highlighted lines, and evenly spaced points of long ones."""
    lines = [line for line in chart.lines if len(chart.lines) <= LINES or line.tone != "pale"]
    return replace(chart, lines=tuple(map(_thinned, lines)))


def _thinned(line: Line) -> Line:
    if len(line.x) <= STOPS:
        return line
    chosen = np.unique(np.linspace(0, len(line.x) - 1, STOPS).astype(int))
    return replace(line, x=line.x[chosen], y=line.y[chosen])


@fit.register
def _(chart: Scatter) -> Chart:
    """Selects points at random."""
    if len(chart.true) <= POINTS:
        return chart
    chosen = np.sort(np.random.default_rng(0).choice(len(chart.true), POINTS, replace=False))
    return replace(chart, true=chart.true[chosen], predicted=chart.predicted[chosen])
