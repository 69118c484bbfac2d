"""The rule that decides whether a measurement agrees with a claim: a 95 % interval over seeds against a margin.

Measurements of the same seed are compared with each other, so what a seed does to both cancels. The interval is
Student's, for the mean over seeds. With fewer than three seeds there is none, and nothing can be told: two seeds can be
equal by chance, which would be an interval of no width.

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

from vitrail.charts.measure import count

Verdict = Literal["agrees", "disagrees", "cannot tell"]
LEVEL = 0.95
LEAST = 3  # seeds of an interval


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its interval, which is infinite for fewer than three."""

    mean: float
    low: float
    high: float
    seeds: int

    def text(self, unit: str = "points") -> str:
        """The estimate as text; shares are in percentage points."""
        scale, digits = (100.0, 1) if unit == "points" or unit.startswith("%") else (1.0, 2)
        sign = "+" if unit in ("points", "% of the side") else ""
        numbers = [f"{scale * value:{sign}.{digits}f}" for value in (self.mean, self.low, self.high)]
        shown = numbers[0].replace("-", "−") + (unit if unit.startswith("%") else f" {unit}".rstrip())
        if self.seeds < LEAST:
            return f"{shown} ({count(self.seeds, 'seed')})"
        low, high = (number.replace("-", "−") for number in numbers[1:])
        return f"{shown} ({low} to {high}, {self.seeds} seeds)"


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of one value per seed, and Student's 95 % interval for it."""
    mean, seeds = statistics.fmean(values), len(values)
    if seeds < LEAST:
        return Estimate(mean, -math.inf, math.inf, seeds)
    from scipy.stats import t  # slow to import

    half = float(t.ppf((1 + LEVEL) / 2, seeds - 1)) * statistics.stdev(values) / math.sqrt(seeds)
    return Estimate(mean, mean - half, mean + half, seeds)


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
