"""Measures: what a score is called, what it means and how it is written."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Measure:
    """A score of a model, such as top-1 accuracy."""

    name: str  # its key in metrics.json, and after "train_" and "val_" its column in metrics.csv
    title: str  # "top-1"
    meaning: str = ""  # in one phrase
    percent: bool = False  # a share from 0 to 1, written in percent
    lower_is_better: bool = False
    heading: str = ""  # the title of a chart: "Top-1 accuracy"; by default `title`
    at_most_one: bool = False  # like R², which may be negative

    @property
    def bounded(self) -> bool:
        """Whether 1 is the best possible value, so that a bar can show it."""
        return self.percent or self.at_most_one

    def text(self, value: float, digits: int = 1) -> str:
        """The score as people read it; `digits` as in `percent`, two more of them are significant in other numbers."""
        return percent(value, digits) if self.percent else number(value, digits + 2)

    def best(self, values: list[float]) -> float:
        """The best of several values."""
        return min(values) if self.lower_is_better else max(values)


def percent(share: float, digits: int = 1) -> str:
    """A share in percent, with so many digits after the point."""
    return f"{share:.{digits}%}"


def number(value: float, digits: int = 3) -> str:
    """A number with so many significant digits."""
    return f"{value:.{digits}g}"


def count(images: int, thing: str = "image") -> str:
    """A number of things: "1 image", "1,438 images"."""
    return f"{images:,} {thing}{'' if images == 1 else 's'}"
