"""Sortable tables, and that of the scores of classes, labels or values."""

from __future__ import annotations

from dataclasses import dataclass, field

from vitrail.charts.measure import Measure
from vitrail.report.facts import RunFacts
from vitrail.report.images import InlineImage
from vitrail.report.text import between
from vitrail.tasks.bootstrap import Interval


@dataclass(frozen=True)
class Cell:
    """A cell that sorts by `value`, with an optional bar of length `share` and a confidence interval."""

    text: str
    value: float
    share: float | None = None
    interval: Interval | None = None
    title: str = ""


@dataclass(frozen=True)
class Line:
    """A row: name, cells and optional pictures."""

    name: str
    cells: list[Cell]
    pictures: list[InlineImage] = field(default_factory=list)


@dataclass(frozen=True)
class Table:
    """A table with sortable columns, of which the first holds names."""

    caption: str
    columns: list[str]
    lines: list[Line]

    @property
    def illustrated(self) -> bool:
        return any(line.pictures for line in self.lines)

    def lowest(self, column: int = 1, most: int = 2000) -> Table:
        """The table, or its `most` lines with the lowest values in a column."""
        if len(self.lines) <= most:
            return self
        lines = sorted(self.lines, key=lambda line: line.cells[column - 1].value)[:most]
        caption = f"{self.caption}: the {most:,} of {len(self.lines):,} with the lowest {self.columns[column]}"
        return Table(caption, self.columns, lines)


def scores(facts: RunFacts) -> Table | None:
    """The scores of every class, label or value, with confidence intervals if sampled."""
    task = facts.task
    if facts.scores is None or not task.columns:
        return None
    counted = [("images", "support")] if task.counted else []
    intervals = {measure.name: facts.samples.intervals(measure.name) for measure in task.columns}
    lines = []
    for k, score in enumerate(facts.scores.each):
        cells = [
            _score(measure, getattr(score, measure.name), (intervals[measure.name] or {k: None})[k])
            for measure in task.columns
        ]
        cells += [Cell(f"{getattr(score, name):,}", getattr(score, name)) for _, name in counted]
        lines.append(Line(score.name, cells))
    titles = [measure.title for measure in task.columns]
    table = Table(f"Scores of each {task.one}", [task.one, *titles, *(title for title, _ in counted)], lines)
    return table.lowest([measure.name for measure in task.columns].index(task.ranked) + 1)


def _score(measure: Measure, value: float | None, interval: Interval | None) -> Cell:
    if value is None:
        return Cell("–", -1.0, title="no images")
    title = f"95% confidence interval: {between(measure, interval)}" if interval else ""
    if not measure.bounded:  # no maximum for a bar
        return Cell(measure.text(value), value, title=title)
    ends = (_inside(interval[0]), _inside(interval[1])) if interval else None
    return Cell(measure.text(value), value, _inside(value), ends, title)


def _inside(share: float) -> float:
    """A share clipped to the range of a bar; R² may be negative."""
    return min(max(share, 0.0), 1.0)
