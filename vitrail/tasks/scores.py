"""What is measured: the numbers, the scores of an evaluation, and the meters that collect them batch by batch."""

from __future__ import annotations

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
Targets = NDArray[Any]  # (N,) class numbers, or (N, K) float32


LOSS = Measure("loss", "loss", "the training objective on these images", lower_is_better=True)


@dataclass(frozen=True, eq=False, kw_only=True)
class Scores(ABC):
    """What was measured on some images. Shares are from 0 to 1."""

    images: int
    loss: float
    folder: Path | None = None  # where `evaluate` wrote its files

    @property
    @abstractmethod
    def main(self) -> float:
        """The score that the best epoch is chosen by: the higher, the better."""

    @property
    @abstractmethod
    def each(self) -> Sequence[Any]:
        """The scores of every class, label or value: objects with a `name`."""

    @abstractmethod
    def row(self) -> dict[str, float]:
        """The numbers of an epoch in metrics.csv."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Everything, as plain JSON."""

    @abstractmethod
    def csv(self) -> dict[str, list[list[object]]]:
        """The tables to write, by the names of their files."""

    @abstractmethod
    def table(self, most: int = 20) -> str:
        """The scores as text: overall, then by class, or the `most` worst classes."""

    def summary(self) -> dict[str, float]:
        """The overall numbers."""
        return {"images": self.images} | rounded(self.row())


class Meter(ABC):
    """Measures batch by batch. Two meters merge to exactly what one would have measured."""

    @abstractmethod
    def add(self, outputs: NDArray[np.floating], targets: Targets) -> None:
        """Adds a batch of outputs, (B, M), and targets."""

    @abstractmethod
    def merge(self, other: Any) -> None:
        """Adds what another meter of the same task has seen after this one."""

    @abstractmethod
    def scores(self) -> Scores:
        """What was measured so far."""


class NotFinite(UserError):
    """Outputs are not finite."""


class Columnar(Meter):
    """A meter that keeps some arrays for every image; `reduce` makes the scores of them."""

    def __init__(self, split: Callable[[Any, Any], tuple[Array, ...]], reduce: Callable[..., Scores]):
        self._split, self._reduce = split, reduce
        self._batches: list[tuple[Array, ...]] = []

    def add(self, outputs: NDArray[np.floating], targets: Targets) -> None:
        if not np.isfinite(outputs).all():
            bad = int((~np.isfinite(outputs)).any(axis=1).sum())
            raise NotFinite(
                f"The model's outputs must be finite, but for {bad} of {len(targets)} images they are not: the weights "
                "diverged or are damaged. Take an earlier checkpoint."
            )
        self._batches.append(self._split(outputs.astype(np.float64), targets))

    def merge(self, other: Columnar) -> None:
        self._batches += other._batches

    def scores(self) -> Scores:
        if not sum(len(batch[0]) for batch in self._batches):
            raise UserError("There is nothing to measure: the split has no images.")
        return self._reduce(*(np.concatenate(parts) for parts in zip(*self._batches, strict=True)))


def rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers as they are written to JSON."""
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in values.items()}


def files_line(folder: Path | None) -> list[str]:
    """The last lines of a table of scores: where the files are, if there are any."""
    return [] if folder is None else ["", f"Figures and tables are in {folder}"]
