"""The kinds of charts, as plain data: content without presentation.

Each kind is a frozen dataclass. `charts/draw.py` draws it with matplotlib, `report/assets/report.js` draws the output
of `to_json` on a report. Names and values are complete and unrounded; shortening them is left to the drawing code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

# The role of a line, not its colour: cool for validation, warm for training or highlights, plain for settings, pale for
# one of many. An integer is the index of a run.
Tone = Literal["cool", "warm", "plain", "pale"] | int


@dataclass(frozen=True, eq=False, kw_only=True)
class Chart:
    """Base of all charts."""

    kind: ClassVar[str]  # its builder in report.js
    name: str  # file stem; charts of the same name are drawn side by side in one file
    title: str
    note: str  # the result as a phrase, in lower case
    help: str = ""  # how to read the chart, in sentences; only shown on the page

    @property
    def label(self) -> str:
        """A sentence for screen readers."""
        return f"{self.title}: {self.note}."

    def to_json(self) -> dict[str, Any]:
        """The content in JSON types: numbers with five significant digits, None for NaN."""
        texts = {field.name for field in fields(Chart)} - {"title"}
        drawn = {field.name: plain(getattr(self, field.name)) for field in fields(self) if field.name not in texts}
        return {"kind": self.kind} | drawn


@dataclass(frozen=True, eq=False)
class Line:
    """A line of a chart. Lines of the same name share a legend entry."""

    name: str
    x: Values
    y: Values
    tone: Tone = "cool"
    steps: bool = False  # each value holds until the next
    dot: tuple[float, float] | None = None  # marked point, such as the best epoch or a threshold
    dashed: bool = False  # a reference, not a measurement


@dataclass(frozen=True, eq=False, kw_only=True)
class Lines(Chart):
    """Lines over a common axis: training curves, precision-recall curves, the learning-rate range test."""

    kind = "lines"
    x: str
    y: str = ""
    lines: tuple[Line, ...]
    percent: bool = False  # y is a share
    square: bool = False  # both axes are shares from 0 to 1
    log: bool = False  # x is logarithmic
    low: float | None = None  # limits of the y axis, by default those of the data
    high: float | None = None
    mark: float | None = None  # x of a vertical marker line


@dataclass(frozen=True, eq=False, kw_only=True)
class Matrix(Chart):
    """A confusion matrix: true classes in rows, predicted ones in columns."""

    kind = "matrix"
    names: tuple[str, ...]
    counts: NDArray[np.int64]  # K K
    totals: NDArray[np.int64]  # K, images of each true class; exceeds the row sum if columns are omitted


@dataclass(frozen=True, eq=False, kw_only=True)
class Bars(Chart):
    """Horizontal bars of shares, highest first, each with a reference tick."""

    kind = "bars"
    x: str
    names: tuple[str, ...]
    values: Values
    tick: str  # meaning of the ticks
    ticks: Values

    def lowest(self, most: int) -> Bars:
        """The chart with only the `most` lowest bars."""
        return replace(self, names=self.names[-most:], values=self.values[-most:], ticks=self.ticks[-most:])


@dataclass(frozen=True, eq=False, kw_only=True)
class Reliability(Chart):
    """A reliability diagram: accuracy by confidence, in bins of equal width from 0 to 1.

    A bin is (mean confidence, accuracy, number of predictions).
    """

    kind = "reliability"
    bins: tuple[tuple[float, float, int], ...]
    x: str
    y: str
    things: str  # what is counted: images, labels


@dataclass(frozen=True, eq=False, kw_only=True)
class Scatter(Chart):
    """Predicted against true values."""

    kind = "scatter"
    true: Values
    predicted: Values


@dataclass(frozen=True, eq=False, kw_only=True)
class Heads(Chart):
    """Attention distance of every head by layer, in pixels."""

    kind = "heads"
    layers: tuple[Values, ...]
    even: Values  # by layer, the distance of uniform attention
    uniform: str  # legend entry of `even`
    width: int  # of the image, in pixels


@dataclass(frozen=True, eq=False, kw_only=True)
class ErrorBars(Chart):
    """Repeated measurements of shares over a logarithmic axis, with means and standard deviations."""

    kind = "error_bars"
    x: str
    y: str
    at: Values
    each: tuple[Values, ...]
    mean: Values
    std: Values


@dataclass(frozen=True, eq=False)
class Points:
    """A series of measurements with their intervals; NaN for none."""

    name: str
    x: Values
    y: Values
    low: Values
    high: Values
    tone: int = 0  # index of the colour
    joined: bool = True  # by a line
    dashed: bool = False  # a fit or a reference, without markers


@dataclass(frozen=True, eq=False, kw_only=True)
class Series(Chart):
    """Several series of measurements with intervals over an axis of numbers or of names."""

    kind = "series"
    x: str
    y: str
    series: tuple[Points, ...]
    names: tuple[str, ...] = ()  # of x = 0, 1, …, if it has names instead of numbers
    log: bool = False  # x is logarithmic
    percent: bool = True  # y is a share


def plain(value: Any) -> Any:
    """A value in JSON types; floats with five significant digits."""
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, float | np.floating):
        return float(f"{value:.5g}") if np.isfinite(value) else None
    if isinstance(value, Line | Points):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(each) for each in value]
    return value
