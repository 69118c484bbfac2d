"""The kinds of charts, as plain data: what is shown, not how.

Each kind is a frozen dataclass. `charts/draw.py` draws it by matplotlib, `report/assets/report.js` on the page of a
report, from what `to_json` gives. Names are as in the data, numbers unrounded and complete: whoever draws shortens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

# What a line is, not its colour: cool for validation, warm for training or what stands out, plain for settings, pale
# for one of many. A number is that of a run among several.
Tone = Literal["cool", "warm", "plain", "pale"] | int


@dataclass(frozen=True, eq=False, kw_only=True)
class Chart:
    """What all charts have."""

    kind: ClassVar[str]  # what report.js calls it
    name: str  # stem of the file; charts of one name are drawn side by side in one file
    title: str
    note: str  # the result, in a phrase that begins in lower case
    help: str = ""  # how to read the chart, in sentences; only the page has room for it

    @property
    def label(self) -> str:
        """The chart in a sentence, for screen readers."""
        return f"{self.title}: {self.note}."

    def to_json(self) -> dict[str, Any]:
        """What is drawn, in types that JSON knows: numbers with five digits, None for NaN."""
        texts = {field.name for field in fields(Chart)} - {"title"}
        drawn = {field.name: plain(getattr(self, field.name)) for field in fields(self) if field.name not in texts}
        return {"kind": self.kind} | drawn


@dataclass(frozen=True, eq=False)
class Line:
    """A line of a chart. Lines of one name share an entry of the legend."""

    name: str
    x: Values
    y: Values
    tone: Tone = "cool"
    steps: bool = False  # each value holds until the next
    dot: tuple[float, float] | None = None  # a point that is marked: the best epoch, a threshold


@dataclass(frozen=True, eq=False, kw_only=True)
class Lines(Chart):
    """Lines over a common axis: training curves, precision over recall, the learning-rate range test."""

    kind = "lines"
    x: str
    y: str = ""
    lines: tuple[Line, ...]
    percent: bool = False  # y is a share
    square: bool = False  # both axes are shares and go from 0 to 1
    log: bool = False  # x is logarithmic
    low: float | None = None  # ends of the y axis, by default those of the data
    high: float | None = None
    mark: float | None = None  # x of a vertical line


@dataclass(frozen=True, eq=False, kw_only=True)
class Matrix(Chart):
    """A confusion matrix: true classes in rows, predicted ones in columns."""

    kind = "matrix"
    names: tuple[str, ...]
    counts: NDArray[np.int64]  # K K
    totals: NDArray[np.int64]  # K, images of each true class: more than the sum of a row if columns are left out


@dataclass(frozen=True, eq=False, kw_only=True)
class Bars(Chart):
    """A bar for each name, with a tick for comparison. Shares, the highest first."""

    kind = "bars"
    x: str
    names: tuple[str, ...]
    values: Values
    tick: str  # what the ticks are
    ticks: Values

    def lowest(self, most: int) -> Bars:
        """The same chart with no more bars than this."""
        return replace(self, names=self.names[-most:], values=self.values[-most:], ticks=self.ticks[-most:])


@dataclass(frozen=True, eq=False, kw_only=True)
class Reliability(Chart):
    """A reliability diagram: how often predictions are right at each confidence, over bins of equal width from 0 to 1.

    A bin is its mean confidence, its accuracy and its number of predictions.
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
    """A dot for each attention head, by layer: how far it looks, in pixels."""

    kind = "heads"
    layers: tuple[Values, ...]
    even: Values  # by layer, the distance of a head with uniform attention
    uniform: str  # what such a head is called
    width: int  # of the image, in pixels


@dataclass(frozen=True, eq=False, kw_only=True)
class ErrorBars(Chart):
    """Repeated measurements over a logarithmic axis: each one, their means and standard deviations. Shares."""

    kind = "error_bars"
    x: str
    y: str
    at: Values
    each: tuple[Values, ...]
    mean: Values
    std: Values


def plain(value: Any) -> Any:
    """A value in types that JSON knows; floats with no more digits than a chart can show."""
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, float | np.floating):
        return float(f"{value:.5g}") if np.isfinite(value) else None
    if isinstance(value, Line):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(each) for each in value]
    return value
