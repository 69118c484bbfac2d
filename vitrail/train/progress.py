"""The progress of a run, and its clock."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from vitrail.tasks.scores import Scores
from vitrail.world import world


@dataclass
class Progress:
    """All state of a run outside the objective and the optimisers."""

    step: int = 0  # optimiser steps done
    seconds: float = 0.0  # since the start, without interruptions
    prepared: float = 0.0  # part of `seconds` before the first step, spent on a teacher
    lr: float = 0.0  # of the last step
    trained: float = 0.0  # seconds of this epoch's steps
    waited: float = 0.0  # part of `trained` spent waiting for data
    taught: float | None = None  # part of `trained` spent on the teacher, if there is one
    best: float = -math.inf  # score of the best epoch, by --best
    error: float = 0.0  # its standard error
    leader: int = 0  # the best epoch; 0 in a checkpoint of an earlier version
    kept: int = 0  # epoch of the saved weights; 0 if not known, in a checkpoint of an earlier version
    count: int = 0  # steps of this epoch
    sums: dict[str, float] = field(default_factory=dict)  # of the values logged in these steps
    rows: list[dict[str, float]] = field(default_factory=list)  # metrics.csv

    def __post_init__(self) -> None:
        self._clock = self._saved = time.monotonic()
        self.took = 0.0  # seconds of the last step

    @property
    def elapsed(self) -> float:
        """Seconds of steps and validations, from which the time still needed is estimated."""
        return self.seconds - self.prepared

    def tick(self) -> float:
        """Adds the time since the last tick to the run's time, and returns it: that of all processes."""
        now = time.monotonic()
        passed, self._clock = world().mean({"passed": now - self._clock})["passed"], now
        self.seconds += passed
        return passed

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the enclosed time as waiting for data."""
        start = time.monotonic()
        yield
        self.waited += time.monotonic() - start

    @contextmanager
    def teaching(self) -> Iterator[None]:
        """Counts the enclosed time as the teacher's."""
        start = time.monotonic()
        yield
        self.taught = (self.taught or 0.0) + time.monotonic() - start

    def minutes_unsaved(self) -> float:
        return (time.monotonic() - self._saved) / 60

    def add(self, values: Mapping[str, float]) -> None:
        """Records an optimiser step, which began at the last tick, and its values."""
        self.step += 1
        self.count += 1
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        self.took = self.tick()
        self.trained += self.took

    def mean(self, name: str) -> float:
        """The mean of a value over this epoch's steps."""
        return self.sums.get(name, 0.0) / max(self.count, 1)

    def stalled(self, patience: int, since: float = 0.0) -> bool:
        """Whether the score has not improved for `patience` epochs, counted from epoch `since`; 0 is never."""
        return 0 < patience <= len(self.rows) - max(self.leader, since)

    def close_epoch(self, scores: Scores, more: Mapping[str, float] | None = None, best: str | None = None) -> None:
        """Appends the row of a finished epoch, decides whether to keep its weights, and resets the epoch's counters.

        Kept is the last epoch within one standard error of the best: the validation images cannot tell these epochs
        apart, and the last of them has the lowest learning rate. The best one is in part the luckiest. `more` are
        values of the epoch besides its scores; `best` names the score that decides.
        """
        self.tick()
        trained = self.trained or math.inf
        self.rows.append(
            {
                "epoch": len(self.rows) + 1,
                "step": self.step,
                "lr": self.lr,
                **{f"train_{name}": self.mean(name) for name in self.sums},
                **{f"val_{name}": value for name, value in {**scores.row(), **(more or {})}.items()},
                "seconds": round(self.seconds, 2),
                "wait": round(self.waited / trained, 4),  # share of the steps' time
                **({} if self.taught is None else {"teach": round(self.taught / trained, 4)}),
            }
        )
        score, error = scores.by(best)
        if score > self.best:
            self.best, self.error, self.leader = score, error, len(self.rows)
        if score >= self.best - self.error:
            self.kept = len(self.rows)
        self.trained = self.waited = 0.0
        self.taught = None if self.taught is None else 0.0
        self.count, self.sums = 0, dict.fromkeys(self.sums, 0.0)

    def state_dict(self) -> dict[str, Any]:
        self._saved = time.monotonic()
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        restored = Progress(**state)
        counts = (restored.step, restored.leader, restored.kept, restored.count)
        if any(type(count) is not int or count < 0 for count in counts):
            raise ValueError("a count is not a whole number")
        numbers = [restored.seconds, restored.lr, restored.best, *restored.sums.values()]
        numbers += [value for row in restored.rows for value in row.values()]
        if any(type(number) not in (int, float) for number in numbers):
            raise TypeError("a value is not a number")
        epochs = [row["epoch"] for row in restored.rows]
        if epochs != [*range(1, len(epochs) + 1)] or max(restored.leader, restored.kept) > len(epochs):
            raise ValueError("its epochs are not those of a run")
        for name, value in asdict(restored).items():
            setattr(self, name, value)
