"""What a call of `vitrail.train` brings as Python functions instead of settings."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vitrail.errors import UserError
from vitrail.tasks.objective import Objective
from vitrail.train.progress import Progress

Loss = Callable[[Tensor, Tensor], Tensor]  # outputs (B, M) and targets (B, K) to a number


@dataclass(frozen=True)
class Custom:
    """The caller's own model, augmentation, objective, optimiser and schedule; None where vitrail's are used."""

    model: nn.Module | None = None  # trained in a copy, from its present weights
    augment: Callable[[Tensor], Tensor] | None = None  # images (B, C, H, W), 0 to 1, to the same shape
    objective: Loss | type[Objective] | None = None
    optimizer: Callable[[list[dict[str, Any]]], Optimizer] | None = None  # of parameter groups
    schedule: Callable[[float], float] | None = None  # from the share of training done to the share of the peak rate
    on_epoch: Callable[[Progress], object] | None = None  # called after every epoch; True stops the run

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not callable(value):
                raise UserError(f"'{field.name}' must be a function, but it is {type(value).__name__}.")
        own = self.objective
        if isinstance(own, type) and not issubclass(own, Objective):
            raise UserError(f"'objective' must be a function or a subclass of Objective: write {own.__name__}(…).")

    @property
    def names(self) -> tuple[str, ...]:
        """What the result depends on, which a resumed run needs again."""
        return tuple(f.name for f in fields(self) if f.name != "on_epoch" and getattr(self, f.name) is not None)

    def stops(self, progress: Progress) -> bool:
        """Calls `on_epoch`; whether it stops the run."""
        stop: object = None if self.on_epoch is None else self.on_epoch(progress)
        return isinstance(stop, bool | np.bool_) and bool(stop)

    def augmented(self, pixels: Tensor, white: float) -> Tensor:
        """Pixels (B, C, H, W), from 0 to `white`, after the caller's augmentation."""
        if self.augment is None:
            return pixels
        images: object = self.augment(pixels.float() / white)
        if not isinstance(images, Tensor) or images.shape != pixels.shape:
            got = f"a tensor of shape {tuple(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
            raise UserError(f"'augment' must return images of shape {tuple(pixels.shape)}, but it returned {got}.")
        return images.to(torch.float32) * white

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The caller's loss of outputs (B, M) against targets (B, K)."""
        assert self.objective is not None
        loss: object = self.objective(outputs, targets)  # type: ignore[arg-type]  # a function, not a class
        if not isinstance(loss, Tensor) or loss.numel() != 1 or (outputs.requires_grad and not loss.requires_grad):
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            got += " without a gradient" if isinstance(loss, Tensor) and loss.numel() == 1 else ""
            raise UserError(f"'objective' must return one number, as a tensor with a gradient, but it returned {got}.")
        return loss.reshape(())

    def share(self, done: float) -> float:
        """The caller's share of the peak learning rate, where a share of training is done."""
        assert self.schedule is not None
        share: Any = self.schedule(done)
        try:
            number = float(share)
        except (TypeError, ValueError, RuntimeError):  # of a tensor with several values
            number = math.nan
        if not 0 <= number < math.inf:
            raise UserError(f"'schedule' must return a number from 0 up, but schedule({done:g}) returned {share!r}.")
        return number

    def optimizers(self, groups: list[dict[str, Any]]) -> list[Optimizer]:
        """The caller's optimiser."""
        assert self.optimizer is not None
        built: object = self.optimizer(groups)
        if not isinstance(built, Optimizer):
            kind = type(built).__name__
            raise UserError(f"'optimizer' must return a torch.optim.Optimizer, but it returned {kind}.")
        for group in built.param_groups:
            group.setdefault("scale", 1.0)
        return [built]


NOTHING = Custom()
