"""Objectives: modules that own a model, its moving average and its loss.

An objective is what the training loop calls, and what `compile` and, with many processes, DDP or FSDP2 wrap. Targets
arrive as mixing and label smoothing leave them: (B, K) shares of classes, probabilities of labels, or values.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.config import DistillConfig
from vitrail.models import Model
from vitrail.models.ema import Ema
from vitrail.models.lora import merged

Loss = Literal["ce", "bce"]


class Batch(NamedTuple):
    """What one forward pass learns from."""

    images: Tensor  # (B, C, H, W), augmented and normalised
    targets: Tensor  # (B, K)
    numbers: Tensor  # (B,), the images' places in the training split


class Objective(nn.Module):
    """Base of all objectives. A task's own defines `compare`, and may define `show` and `lesson`.

    `ema` is the decay of the moving average of the weights; 0 means none.
    """

    def __init__(self, model: Model, ema: float = 0.0):
        super().__init__()
        self.model = model
        self.ema = Ema(model, ema) if ema else None

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """The "loss" of a batch, and other numbers to log."""
        outputs = self.model(batch.images).float()
        return {"loss": self.compare(outputs, batch.targets), **self.show(outputs, batch.targets)}

    def compare(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of these outputs."""
        raise NotImplementedError

    def show(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Numbers to log besides the loss, such as the training accuracy."""
        return {}

    def lesson(self, outputs: Tensor, taught: Tensor, how: DistillConfig) -> dict[str, Tensor]:
        """The "loss" of outputs against those of a teacher and, for classes and labels, how often they "agree".

        By default the outputs themselves are compared, by mean squared error.
        """
        return {"loss": F.mse_loss(outputs, taught)}

    def after_step(self, step: int) -> None:
        """Updates the moving average; called after every optimiser step."""
        if self.ema is not None:
            self.ema.update(self.model, step)

    def kept(self) -> Model:
        """The model to validate and save: averaged, with LoRA adapters merged."""
        return merged(self._averaged)

    def parts(self) -> dict[str, Any]:
        """The objects whose state a checkpoint holds, by name."""
        return {"model": self.model, "kept": self._averaged}

    @property
    def _averaged(self) -> Model:
        return self.model if self.ema is None else self.ema.model


class CrossEntropy(Objective):
    """Cross-entropy: each image belongs to one class. `weights`, (K,), are class weights.

    With "bce", every class is a binary question and the loss of an image is the sum over the classes.
    """

    def __init__(
        self,
        model: Model,
        loss: Loss = "ce",
        weights: Tensor | None = None,
        smoothing: float = 0.0,
        ema: float = 0.0,
    ):
        super().__init__(model, ema)
        self.loss = loss
        self.weights = weights
        self.smoothing = smoothing

    def compare(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.loss == "bce":
            weights = None if self.weights is None else targets @ self.weights[:, None]  # of every image: B 1
            return F.binary_cross_entropy_with_logits(outputs, targets, weights, reduction="sum") / len(targets)
        if self.weights is not None:
            targets = weigh(targets, self.weights, self.smoothing)
        return F.cross_entropy(outputs, targets)

    def show(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"top1": same_class(outputs, targets)}

    def lesson(self, outputs: Tensor, taught: Tensor, how: DistillConfig) -> dict[str, Tensor]:
        if how.distill == "hard":
            loss = F.cross_entropy(outputs, taught.argmax(dim=1))
        else:
            ours, theirs = (F.log_softmax(logits / how.distill_tau, dim=1) for logits in (outputs, taught))
            loss = F.kl_div(ours, theirs, reduction="batchmean", log_target=True) * how.distill_tau**2
        return {"loss": loss, "agree": same_class(outputs, taught)}


class BinaryCrossEntropy(Objective):
    """Binary cross-entropy: every label is a yes-or-no question. `weights`, (K,), multiply the loss of the yes."""

    def __init__(self, model: Model, weights: Tensor | None = None, ema: float = 0.0):
        super().__init__(model, ema)
        self.weights = weights

    def compare(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(outputs, targets, pos_weight=self.weights)

    def lesson(self, outputs: Tensor, taught: Tensor, how: DistillConfig) -> dict[str, Tensor]:
        probabilities = (taught / how.distill_tau).sigmoid()
        loss = F.binary_cross_entropy_with_logits(outputs / how.distill_tau, probabilities) * how.distill_tau**2
        return {"loss": loss, "agree": ((outputs > 0) == (taught > 0)).float().mean()}


class SquaredError(Objective):
    """Mean squared error in standard deviations of the training targets, so that values of any scale count alike."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: Model, mean: tuple[float, ...], std: tuple[float, ...], ema: float = 0.0):
        super().__init__(model, ema)
        self.register_buffer("mean", torch.tensor(mean))
        self.register_buffer("std", torch.tensor(std))

    def compare(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(outputs, (targets - self.mean) / self.std)


def class_tensor(weights: NDArray[np.float32] | None, model: Model) -> Tensor | None:
    """Class weights on the device of a model."""
    return None if weights is None else torch.from_numpy(weights).to(next(model.parameters()).device)


def same_class(ours: Tensor, theirs: Tensor) -> Tensor:
    """The share of rows whose largest entry is in the same column."""
    return (ours.detach().argmax(dim=1) == theirs.argmax(dim=1)).float().mean()


def weigh(targets: Tensor, weights: Tensor, smoothing: float) -> Tensor:
    """Smoothed targets, (B, K), as if they had been multiplied by class weights before smoothing.

    Weighting after smoothing would make every image pull towards the rare classes: with 10 classes and a smoothing of
    0.1, a class of weight 50 would get half the mass of the image's own class.
    """
    even = smoothing / targets.shape[1]
    sharp = (targets - even) * weights
    return sharp + sharp.sum(dim=1, keepdim=True) * even / (1 - smoothing)
