"""The learning-rate schedule of a run, and its end: by steps or by time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from vitrail.config import OptimConfig, TrainConfig
from vitrail.data import Data
from vitrail.train.custom import NOTHING, Custom
from vitrail.train.optim import lr_at
from vitrail.train.progress import Progress

_FORWARD = 1 / 3  # of a training step's time: the backward pass takes about twice the forward pass


@dataclass(frozen=True)
class Schedule:
    """The learning-rate schedule of a run, and its end.

    With a time budget, the share of time replaces the share of steps, so the run ends on time and at the final
    learning rate, however fast the machine. The budget includes the last validation, whose time is reserved.
    """

    optim: OptimConfig
    per_epoch: int  # optimiser steps
    validation: float  # the time of a validation, in steps
    own: Callable[[float], float] | None = None  # the caller's, see `Custom.schedule`

    @classmethod
    def of(cls, config: TrainConfig, data: Data, batches: int, custom: Custom = NOTHING) -> Schedule:
        """The schedule of a run with this number of batches per epoch."""
        optim = config.optim
        validation = len(data.splits["val"]) / (optim.batch_size * optim.grad_accum_steps)
        return cls(optim, batches // optim.grad_accum_steps, validation, custom.schedule)

    @property
    def steps(self) -> int:
        """Steps of the run; with a time budget, the planned number."""
        return max(round(self.per_epoch * self.optim.epochs), 1)

    @property
    def epochs(self) -> int:
        """Epochs of the run; the last may be partial."""
        return math.ceil(self.steps / self.per_epoch)

    def lr(self, progress: Progress) -> float:
        """The learning rate of the next step."""
        place: float = progress.step
        if self.optim.time_budget is not None:
            elapsed = progress.elapsed
            place = elapsed / max(self._training_seconds(progress) - progress.prepared, elapsed, 1e-9) * self.steps
        if self.own is not None:
            return self.optim.lr * self.own(place / self.steps)
        return lr_at(place, self.steps, round(self.per_epoch * self.optim.warmup_epochs), self.optim)

    def over(self, progress: Progress) -> bool:
        """Whether the run has used up its steps or its time."""
        if self.optim.time_budget is None:
            return progress.step >= self.steps
        return progress.step > 0 and progress.seconds >= self._training_seconds(progress)

    def seconds_left(self, progress: Progress) -> float:
        if self.optim.time_budget is None:
            return progress.elapsed / max(progress.step, 1) * (self.steps - progress.step)
        return max(self.optim.time_budget - progress.seconds, 0)

    def _training_seconds(self, progress: Progress) -> float:
        """The time budget minus the last validation, estimated from the steps so far."""
        assert self.optim.time_budget is not None
        last = self.validation * _FORWARD * progress.elapsed / max(progress.step, 1)
        return max(self.optim.time_budget - last, self.optim.time_budget / 2)
