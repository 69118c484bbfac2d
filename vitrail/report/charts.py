"""Charts on a page: with no more classes, lines and points than a page has room for."""

from __future__ import annotations

from dataclasses import replace
from functools import singledispatch

import numpy as np

from vitrail.charts.kinds import Bars, Chart, Line, Lines, Matrix, Scatter

CELLS = 50  # classes of a confusion matrix
BARS = 50
LINES, STOPS = 12, 150  # lines of a chart, and points of a line
POINTS = 1500  # of a scatter plot


@singledispatch
def fit(chart: Chart) -> Chart:
    """The chart itself, or as much of it as a page has room for; then its `help` says what is shown."""
    return chart


@fit.register
def _(chart: Matrix) -> Chart:
    """Of many classes, those that are confused most."""
    if len(chart.names) <= CELLS:
        return chart
    wrong = chart.counts - np.diag(chart.counts.diagonal())
    most = np.sort(np.argsort(-(wrong.sum(axis=0) + wrong.sum(axis=1)), kind="stable")[:CELLS])
    return replace(
        chart,
        names=tuple(chart.names[i] for i in most),
        counts=chart.counts[np.ix_(most, most)],
        totals=chart.totals[most],
        help=f"The {CELLS} of {len(chart.names)} classes that are confused most. {chart.help}",
    )


@fit.register
def _(chart: Bars) -> Chart:
    """Of many bars, the lowest."""
    if len(chart.names) <= BARS:
        return chart
    return replace(chart.lowest(BARS), help=f"The {BARS} lowest of {len(chart.names)}. {chart.help}")


@fit.register
def _(chart: Lines) -> Chart:
    """Of many lines, those that stand out; of long ones, some points."""
    lines = [line for line in chart.lines if len(chart.lines) <= LINES or line.tone != "pale"]
    return replace(chart, lines=tuple(map(_thinned, lines)))


def _thinned(line: Line) -> Line:
    if len(line.x) <= STOPS:
        return line
    chosen = np.unique(np.linspace(0, len(line.x) - 1, STOPS).astype(int))
    return replace(line, x=line.x[chosen], y=line.y[chosen])


@fit.register
def _(chart: Scatter) -> Chart:
    """Of many points, some at random."""
    if len(chart.true) <= POINTS:
        return chart
    chosen = np.sort(np.random.default_rng(0).choice(len(chart.true), POINTS, replace=False))
    return replace(chart, true=chart.true[chosen], predicted=chart.predicted[chosen])
