"""How far a run has come and when it ends: after a number of steps, or of seconds."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from vitrail.config import OptimConfig
from vitrail.models import Model
from vitrail.train.optim import lr_at
from vitrail.train.run import Progress

_FORWARD = 1 / 3  # of the time of a training step: the backward pass is about twice the forward pass


@dataclass(frozen=True)
class Schedule:
    """The learning rate over a run, and its end.

    With a time budget, the share of the time that has passed takes the place of the share of the steps: however
    fast the machine is and whatever else it does, the run ends in time and with the learning rate that it must
    end with. The last validation is part of the budget, so its time is kept free.
    """

    optim: OptimConfig
    per_epoch: int  # optimiser steps
    validation: float  # forward passes over the validation images, counted in steps

    @property
    def steps(self) -> int:
        """Steps of the whole run; with a time budget as they were planned."""
        return max(round(self.per_epoch * self.optim.epochs), 1)

    @property
    def epochs(self) -> int:
        """Epochs of the whole run; the last one may be a part of one."""
        return math.ceil(self.steps / self.per_epoch)

    def lr(self, progress: Progress) -> float:
        """The learning rate of the next step."""
        place: float = progress.step
        if self.optim.time_budget is not None:
            elapsed = progress.elapsed
            place = elapsed / max(self._training_seconds(progress) - progress.prepared, elapsed, 1e-9) * self.steps
        return lr_at(place, self.steps, round(self.per_epoch * self.optim.warmup_epochs), self.optim)

    def over(self, progress: Progress) -> bool:
        """Whether the run has had all its steps, or all its time."""
        if self.optim.time_budget is None:
            return progress.step >= self.steps
        return progress.step > 0 and progress.seconds >= self._training_seconds(progress)

    def seconds_left(self, progress: Progress) -> float:
        if self.optim.time_budget is None:
            return progress.elapsed / max(progress.step, 1) * (self.steps - progress.step)
        return max(self.optim.time_budget - progress.seconds, 0)

    def _training_seconds(self, progress: Progress) -> float:
        """The time budget less what the last validation will take, as far as the steps so far tell."""
        assert self.optim.time_budget is not None
        last = self.validation * _FORWARD * progress.elapsed / max(progress.step, 1)
        return max(self.optim.time_budget - last, self.optim.time_budget / 2)


def images_per_second(model: Model, batch_size: int, device: str) -> float:
    """How fast this machine trains, roughly: forward and backward passes of random images for about two seconds."""
    config = model.config
    images = torch.rand(batch_size, config.channels, *config.img_size, device=device)
    labels = torch.zeros(batch_size, dtype=torch.long, device=device)
    model.to(device)
    count, begun = -2, time.monotonic()  # the first two warm up
    while count < 3 or time.monotonic() - begun < 2:
        if count == 0:
            begun = time.monotonic()
        torch.autograd.backward(F.cross_entropy(model(images).float(), labels))
        model.zero_grad(set_to_none=True)
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)
        count += 1
    return count * batch_size / (time.monotonic() - begun)
