"""Measures, the scores of an evaluation, and meters that accumulate them batch by batch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.charts.measure import Measure
from vitrail.errors import UserError

Array = NDArray[Any]
Numbers = NDArray[np.int64]
Floats = NDArray[np.float64]
Targets = NDArray[Any]  # (N,) class indices, or (N, K) float32


LOSS = Measure("loss", "loss", "the training objective on these images", lower_is_better=True)


@dataclass(frozen=True, eq=False, kw_only=True)
class Scores(ABC):
    """The scores of a model on some images. Shares are from 0 to 1."""

    images: int
    loss: float = math.nan  # NaN if the task does not measure it
    loss_error: float = 0.0  # standard error of the loss; 0 if it is not measured
    folder: Path | None = None  # where `evaluate` wrote them

    @property
    @abstractmethod
    def main(self) -> float:
        """The score that selects the epoch to keep; higher is better."""

    @property
    def standard_error(self) -> float:
        """The standard error of `main`, over samples of the images; 0 if the task does not define one."""
        return 0.0

    def by(self, best: str | None) -> tuple[float, float]:
        """The score that --best names, higher is better, and its standard error; by default `main`."""
        if best == "loss":
            return -self.loss, self.loss_error
        if best == "f1":
            return self.row()["macro_f1"], 0.0
        return self.main, self.standard_error

    @property
    @abstractmethod
    def each(self) -> Sequence[Any]:
        """The scores of every class, label or value: objects with a `name`."""

    @abstractmethod
    def row(self) -> dict[str, float]:
        """The values of an epoch's row in metrics.csv."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """All scores, as plain JSON."""

    @abstractmethod
    def csv(self) -> dict[str, list[list[object]]]:
        """The CSV tables, by file name."""

    @abstractmethod
    def table(self, most: int = 20) -> str:
        """The scores as text: overall, then by class, or the `most` worst classes."""

    def summary(self) -> dict[str, float]:
        """The overall scores."""
        return {"images": self.images} | rounded(self.row())


class Meter(ABC):
    """Accumulates batches. Merged meters measure exactly what one meter would have."""

    @abstractmethod
    def add(self, outputs: NDArray[np.floating], targets: Targets) -> None:
        """Adds a batch of outputs, (B, M), and targets."""

    @abstractmethod
    def merge(self, other: Any) -> None:
        """Appends what another meter of the same task measured."""

    @abstractmethod
    def scores(self) -> Scores:
        """The scores of all batches so far."""


class NotFinite(UserError):
    """Raised for outputs that are not finite."""


class Columnar(Meter):
    """A meter that keeps arrays of every image; `reduce` computes the scores from them."""

    def __init__(self, split: Callable[[Any, Any], tuple[Array, ...]], reduce: Callable[..., Scores]):
        self._split, self._reduce = split, reduce
        self._batches: list[tuple[Array, ...]] = []

    def add(self, outputs: NDArray[np.floating], targets: Targets) -> None:
        if not np.isfinite(outputs).all():
            bad = int((~np.isfinite(outputs)).any(axis=1).sum())
            raise NotFinite(
                f"The model's outputs must be finite, but for {bad} of {len(targets)} images they are not: the weights "
                "diverged or are damaged. Use an earlier checkpoint."
            )
        self._batches.append(self._split(outputs.astype(np.float64), targets))

    def merge(self, other: Columnar) -> None:
        self._batches += other._batches

    def scores(self) -> Scores:
        if not sum(len(batch[0]) for batch in self._batches):
            raise UserError("The split has no images to measure.")
        return self._reduce(*(np.concatenate(parts) for parts in zip(*self._batches, strict=True)))


def mean_error(values: Floats) -> float:
    """The standard error of a mean."""
    return float(values.std() / max(len(values), 1) ** 0.5)


def rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values rounded for JSON."""
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in values.items()}


def files_line(folder: Path | None) -> list[str]:
    """The last lines of a table of scores: where its files are, if any."""
    return [] if folder is None else ["", f"Figures and tables are in {folder}"]
