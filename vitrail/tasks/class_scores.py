"""The scores of a classification, overall and by class, as text, JSON and CSV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from vitrail.charts.measure import lean
from vitrail.tasks.calibration import Bin
from vitrail.tasks.scores import Numbers, Scores, files_line, rounded


@dataclass(frozen=True)
class ClassScore:
    name: str
    precision: float
    recall: float
    f1: float
    support: int


@dataclass(frozen=True, eq=False, kw_only=True)
class MulticlassScores(Scores):
    """Classification scores. Rows of the confusion matrix are true classes."""

    top1: float
    top5: float
    ece: float  # expected calibration error
    per_class: list[ClassScore]
    confusion: Numbers
    bins: list[Bin]
    gap: float  # confidence minus accuracy: above 0 the model is overconfident
    temperature: float  # that divided the logits; without it, at a temperature of 1:
    unscaled_ece: float
    unscaled_gap: float

    @property
    def main(self) -> float:
        return self.top1

    @property
    def standard_error(self) -> float:
        """Of a proportion."""
        return float((self.top1 * (1 - self.top1) / self.images) ** 0.5)

    @property
    def macro_f1(self) -> float:
        """The mean F1 of the classes that these images have."""
        return mean_of_classes([score.f1 for score in self.per_class], [score.support for score in self.per_class])

    @property
    def balanced_accuracy(self) -> float:
        """The mean recall of the classes that these images have."""
        return mean_of_classes([score.recall for score in self.per_class], [score.support for score in self.per_class])

    def by(self, best: str | None) -> tuple[float, float]:
        if best == "f1":
            return self.macro_f1, _macro_f1_error(self.confusion)
        if best == "balanced":
            return self.balanced_accuracy, _balanced_error(self.per_class)
        return super().by(best)

    @property
    def each(self) -> list[ClassScore]:
        return self.per_class

    def row(self) -> dict[str, float]:
        means = {"macro_f1": self.macro_f1, "balanced_accuracy": self.balanced_accuracy}
        return {"loss": self.loss, "top1": self.top1, "top5": self.top5, **means}

    def summary(self) -> dict[str, float]:
        scalars = self.row() | {"ece": self.ece}
        scaling = {"temperature": self.temperature, "unscaled_ece": self.unscaled_ece}
        return {"images": self.images} | rounded(scalars | scaling)

    def to_json(self) -> dict[str, Any]:
        return self.summary() | {
            "gap": round(self.gap, 6),
            "unscaled_gap": round(self.unscaled_gap, 6),
            "per_class": [rounded(asdict(score)) for score in self.per_class],
            "confusion": self.confusion.tolist(),
            "bins": [rounded(asdict(bin)) for bin in self.bins],
        }

    def csv(self) -> dict[str, list[list[object]]]:
        return class_tables(self.per_class, self.confusion)

    def table(self, most: int = 20) -> str:
        lines = [
            f"images             {self.images:>7,}",
            f"top-1              {self.top1:>7.2%}",
            *([f"top-5              {self.top5:>7.2%}"] if len(self.per_class) > 5 else []),
            f"macro F1           {self.macro_f1:>7.2%}",
            f"balanced accuracy  {self.balanced_accuracy:>7.2%}",
            f"loss               {self.loss:>7.4f}",
            f"calibration error  {self.ece:>7.2%}  ({lean(self.gap)})",
        ]
        if self.temperature != 1:
            before = f"{lean(self.unscaled_gap)}; temperature {self.temperature:.2f}"
            lines.append(f"  before scaling   {self.unscaled_ece:>7.2%}  ({before})")
        return "\n".join([*lines, "", *class_lines(self.per_class, most), *files_line(self.folder)])


def mean_of_classes(values: Sequence[float], support: Sequence[int]) -> float:
    """The mean over the classes that have images."""
    return float(np.mean([value for value, images in zip(values, support, strict=True) if images]))


def _balanced_error(scores: Sequence[ClassScore]) -> float:
    """The standard error of balanced accuracy: recalls are independent proportions."""
    known = [score for score in scores if score.support]
    return float(sum(s.recall * (1 - s.recall) / s.support for s in known) ** 0.5 / len(known))


def _macro_f1_error(confusion: Numbers) -> float:
    """The standard error of macro F1, by the infinitesimal jackknife: how much an image of each cell changes it."""
    hits, support = confusion.diagonal().astype(float), confusion.sum(axis=1)
    sizes = np.maximum(support + confusion.sum(axis=0), 1).astype(float)
    known = support > 0
    lost = np.where(known, -2 * hits / sizes**2, 0.0)  # by one more image that is, or is called, of the class
    change = lost[:, None] + lost[None, :] + np.diag(np.where(known, 2 / sizes, 0.0))
    return float((confusion * change**2).sum() ** 0.5 / known.sum())


def class_tables(scores: Sequence[ClassScore], confusion: Numbers) -> dict[str, list[list[object]]]:
    """The confusion matrix and the class scores as CSV tables, by file name."""
    names = [score.name for score in scores]
    rows = [[name, *row] for name, row in zip(names, confusion.tolist(), strict=True)]
    numbers = [[s.name, f"{s.precision:.6f}", f"{s.recall:.6f}", f"{s.f1:.6f}", s.support] for s in scores]
    return {
        "confusion": [["true \\ predicted", *names], *rows],
        "per_class": [["class", "precision", "recall", "f1", "support"], *numbers],
    }


def class_lines(scores: Sequence[ClassScore], most: int) -> list[str]:
    """One line per class, or for the `most` with the lowest F1."""
    lines = []
    if len(scores) > most:
        lines.append(f"The {most} classes of {len(scores)} with the lowest F1:")
        scores = sorted(scores, key=lambda score: score.f1)[:most]
    width = max(len("class"), *(len(score.name) for score in scores))
    lines.append(f"{'class':<{width}}  precision  recall      F1  images")
    return lines + [
        f"{s.name:<{width}}  {s.precision:>9.1%}  {s.recall:>6.1%}  {s.f1:>6.1%}  {s.support:>6,}" for s in scores
    ]
