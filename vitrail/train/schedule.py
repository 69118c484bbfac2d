"""The learning-rate schedule of a run, and its end: by steps or by time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from vitrail.config import OptimConfig, StopConfig, TrainConfig
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
    stop: StopConfig = field(default_factory=StopConfig)
    own: Callable[[float], float] | None = None  # the caller's, see `Custom.share`

    @classmethod
    def of(cls, config: TrainConfig, data: Data, passes: int, custom: Custom = NOTHING) -> Schedule:
        """The schedule of a run with this number of forward passes per epoch."""
        optim = config.optim
        validation = len(data.splits["val"]) / optim.batch_size
        own = None if custom.schedule is None else custom.share
        return cls(optim, passes // optim.grad_accum, validation, config.stop, own)

    @property
    def steps(self) -> int:
        """Steps of the run; with a time budget, the planned number."""
        return max(round(self.per_epoch * self.optim.epochs), 1)

    @property
    def epochs(self) -> int:
        """Epochs of the run; the last may be partial."""
        return math.ceil(self.steps / self.per_epoch)

    @property
    def restarts(self) -> tuple[float, ...]:
        """Epochs after which the learning rate decays anew."""
        return self.stop.restarts or ()

    def title(self, epoch: int) -> str:
        """The number of epochs as text: with a time budget the planned number, or `epoch` if that is more."""
        return str(self.epochs) if self.optim.time_budget is None else f"~{max(self.epochs, epoch)}"

    def lr(self, progress: Progress) -> float:
        """The learning rate of the next step."""
        place: float = progress.step
        if self.optim.time_budget is not None:
            elapsed = progress.elapsed
            place = elapsed / max(self._training_seconds(progress) - progress.prepared, elapsed, 1e-9) * self.steps
        if self.own is not None:
            return self.optim.lr * self.own(place / self.steps)
        start, end = self._decay(place)
        warmup = round(self.per_epoch * self.optim.warmup_epochs)
        if start:  # a short extension warms up in a tenth of its steps
            warmup = min(warmup, (end - start) // 10)
        return lr_at(place - start, end - start, warmup, self.optim)

    def _decay(self, place: float) -> tuple[int, int]:
        """The first step of the decay that a step is in, and the first after it."""
        ends = [round(self.per_epoch * epoch) for epoch in self.restarts]
        before, after = [end for end in ends if end <= place], [end for end in ends if end > place]
        return max([0, *before]), min([self.steps, *after])

    def over(self, progress: Progress) -> bool:
        """Whether the run has used up its steps or its time."""
        if self.optim.time_budget is None:
            return progress.step >= self.steps
        return progress.step > 0 and progress.seconds >= self._training_seconds(progress)

    def stalled(self, progress: Progress) -> bool:
        """Whether the score has not improved for --patience epochs."""
        return progress.stalled(self.stop.patience, max([0.0, *self.restarts]))

    def seconds_left(self, progress: Progress) -> float:
        if self.optim.time_budget is None:
            return progress.elapsed / max(progress.step, 1) * (self.steps - progress.step)
        return max(self.optim.time_budget - progress.seconds, 0)

    def _training_seconds(self, progress: Progress) -> float:
        """The time budget minus the last validation, estimated from the steps so far."""
        assert self.optim.time_budget is not None
        last = self.validation * _FORWARD * progress.elapsed / max(progress.step, 1)
        return max(self.optim.time_budget - last, self.optim.time_budget / 2)
