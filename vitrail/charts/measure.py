"""Measures: name, meaning and formatting of scores."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Measure:
    """A score of a model, such as top-1 accuracy."""

    name: str  # key in metrics.json; with "train_" or "val_" before it, column in metrics.csv
    title: str  # "top-1"
    meaning: str = ""  # in one phrase
    percent: bool = False  # a share from 0 to 1, formatted as a percentage
    lower_is_better: bool = False
    heading: str = ""  # chart title, such as "Top-1 accuracy"; by default `title`
    at_most_one: bool = False  # bounded by 1 above only, like R²
    detail: bool = False  # left out of the lines that a run logs
    comparable: bool = True  # whether it ranks runs; the loss of a self-supervised method does not

    @property
    def bounded(self) -> bool:
        """Whether 1 is the maximum, so that the score can be drawn as a bar."""
        return self.percent or self.at_most_one

    def text(self, value: float, digits: int = 1) -> str:
        """The formatted score: `digits` decimals of a percentage, `digits` + 2 significant digits otherwise."""
        return percent(value, digits) if self.percent else number(value, digits + 2)

    def best(self, values: list[float]) -> float:
        """The best of several values."""
        return min(values) if self.lower_is_better else max(values)


def percent(share: float, digits: int = 1) -> str:
    """A share as a percentage with this many decimals."""
    return f"{share:.{digits}%}"


def number(value: float, digits: int = 3) -> str:
    """A number with this many significant digits."""
    return f"{value:.{digits}g}"


def count(images: int, thing: str = "image") -> str:
    """A count with its noun: "1 image", "1,438 images"."""
    return f"{images:,} {thing}{'' if images == 1 else 's'}"


def lean(gap: float) -> str:
    """Mean confidence minus accuracy as text: "underconfident by 13.8 points"."""
    return f"{'over' if gap > 0 else 'under'}confident by {100 * abs(gap):.1f} points"
