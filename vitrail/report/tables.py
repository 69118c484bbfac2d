"""Tables that sort: the scores of classes, labels or numbers, and what any table is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vitrail.config import Task
from vitrail.data.targets import WORDS
from vitrail.evaluate.bootstrap import Interval
from vitrail.evaluate.charts import MEASURES
from vitrail.evaluate.metrics import AnyMetrics, ClassScore, LabelMetrics, LabelScore, Metrics, ValueScore
from vitrail.report.facts import RunFacts
from vitrail.report.images import Picture
from vitrail.report.text import between


@dataclass(frozen=True)
class Cell:
    """A cell of a table that sorts by `value`, may have a bar as long as its share, and an interval."""

    text: str
    value: float
    share: float | None = None
    interval: Interval | None = None
    title: str = ""


@dataclass(frozen=True)
class Line:
    """A row of a table: its name, pictures if there are some, and cells."""

    name: str
    cells: list[Cell]
    pictures: list[Picture] = field(default_factory=list)


@dataclass(frozen=True)
class Table:
    """Columns that sort, the first of them names."""

    caption: str
    columns: list[str]
    lines: list[Line]

    @property
    def illustrated(self) -> bool:
        return any(line.pictures for line in self.lines)

    def lowest(self, column: int = 1, most: int = 2000) -> Table:
        """The whole table, or the lines that are lowest in a column, if there are more than a page has room for."""
        if len(self.lines) <= most:
            return self
        lines = sorted(self.lines, key=lambda line: line.cells[column - 1].value)[:most]
        caption = f"{self.caption}: the {most:,} of {len(self.lines):,} with the lowest {self.columns[column]}"
        return Table(caption, self.columns, lines)


# What is told of each class, label or number: the fields of its score, and what they are called.
_COLUMNS: dict[Task, dict[str, str]] = {
    "multiclass": {"precision": "precision", "recall": "recall", "f1": "F1", "support": "images"},
    "multilabel": {
        "ap": "average precision",
        "precision": "precision",
        "recall": "recall",
        "f1": "F1",
        "threshold": "threshold",
        "support": "images",
    },
    "regression": {"r2": "R²", "mae": "MAE", "rmse": "RMSE"},
}
# The one by which classes, labels or numbers are told apart at a glance.
MAIN_SCORE: dict[Task, str] = {"multiclass": "f1", "multilabel": "ap", "regression": "r2"}
_CAPTIONS: dict[Task, str] = {
    "multiclass": "How well each class is recognised",
    "multilabel": "How well each label is found",
    "regression": "How near each number comes",
}


def scores(facts: RunFacts) -> Table | None:
    """The table of classes, labels or numbers, with intervals where they were sampled."""
    metrics, card = facts.metrics, facts.card
    if metrics is None or card is None:
        return None
    columns = _COLUMNS[card.task]
    intervals = {name: facts.samples.intervals(name) for name in columns}
    lines = []
    for k, score in enumerate(each(metrics)):
        cells = [_score(name, getattr(score, name), (intervals[name] or {k: None})[k]) for name in columns]
        lines.append(Line(score.name, cells))
    table = Table(_CAPTIONS[card.task], [WORDS[card.task].one, *columns.values()], lines)
    return table.lowest(list(columns).index(MAIN_SCORE[card.task]) + 1)


def each(metrics: AnyMetrics) -> Sequence[ClassScore | LabelScore | ValueScore]:
    """The scores of the classes, labels or numbers."""
    if isinstance(metrics, Metrics):
        return metrics.per_class
    return metrics.per_label if isinstance(metrics, LabelMetrics) else metrics.per_value


def _score(name: str, value: float | None, interval: Interval | None) -> Cell:
    if value is None:
        return Cell("–", -1.0, title="no image has it")
    if name == "support":
        return Cell(f"{value:,}", value)
    if name == "threshold":
        return Cell(f"{value:.2f}", value)
    measure = MEASURES[name]
    title = f"95% interval: {between(measure, interval)}" if interval else ""
    if name in ("mae", "rmse"):  # there is no end that a bar could reach
        return Cell(measure.text(value), value, title=title)
    ends = (_inside(interval[0]), _inside(interval[1])) if interval else None
    return Cell(measure.text(value), value, _inside(value), ends, title)


def _inside(share: float) -> float:
    """A share as far as a bar can show it: R² may be below 0."""
    return min(max(share, 0.0), 1.0)
