"""The rule that decides whether a measurement agrees with a claim: a 95 % interval over seeds against a margin.

Measurements of the same seed are compared with each other, so what a seed does to both cancels. The interval is
Student's, for the mean over seeds; with one seed there is none, and nothing can be told.

- A claim that A is above B agrees if the whole interval of A - B is above the margin, and disagrees if it is all below.
- A claim that A equals B agrees if the whole interval of A - B lies within the margin on both sides, and disagrees if
  it lies outside.
- Everything else cannot be told.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["agrees", "disagrees", "cannot tell"]
LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its interval, which is infinite for one seed."""

    mean: float
    low: float
    high: float
    seeds: int

    def text(self, unit: str = "points") -> str:
        """The estimate as text; shares are in percentage points."""
        scale, digits = (100.0, 1) if unit in ("points", "%") else (1.0, 2)
        sign = "+" if unit == "points" else ""
        numbers = [f"{scale * value:{sign}.{digits}f}" for value in (self.mean, self.low, self.high)]
        shown = numbers[0].replace("-", "−") + {"%": "%"}.get(unit, f" {unit}".rstrip())
        if self.seeds < 2:
            return f"{shown} (1 seed)"
        low, high = (number.replace("-", "−") for number in numbers[1:])
        return f"{shown} ({low} to {high}, {self.seeds} seeds)"


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of one value per seed, and Student's 95 % interval for it."""
    mean, count = statistics.fmean(values), len(values)
    if count < 2:
        return Estimate(mean, -math.inf, math.inf, count)
    from scipy.stats import t  # slow to import

    half = float(t.ppf((1 + LEVEL) / 2, count - 1)) * statistics.stdev(values) / math.sqrt(count)
    return Estimate(mean, mean - half, mean + half, count)


def difference(ours: Sequence[float], theirs: Sequence[float]) -> Estimate:
    """The mean difference of values paired by seed."""
    return estimate([a - b for a, b in zip(ours, theirs, strict=True)])


def above(value: Estimate, margin: float = 0.0) -> Verdict:
    """The verdict on the claim that a value is above a margin."""
    if value.low > margin:
        return "agrees"
    return "disagrees" if value.high < margin else "cannot tell"


def within(value: Estimate, margin: float) -> Verdict:
    """The verdict on the claim that a value is zero, up to a margin."""
    if -margin < value.low and value.high < margin:
        return "agrees"
    return "disagrees" if value.low > margin or value.high < -margin else "cannot tell"


def opposite(verdict: Verdict) -> Verdict:
    """The verdict on the opposite claim."""
    return {"agrees": "disagrees", "disagrees": "agrees", "cannot tell": "cannot tell"}[verdict]  # type: ignore[return-value]
