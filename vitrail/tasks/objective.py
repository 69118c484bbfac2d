"""Objectives: modules that hold a model, its moving average and its loss.

The training loop calls an objective; `compile` and, with several processes, DDP or FSDP2 wrap it. Targets arrive after
mixing and label smoothing: (B, K) class distributions, label probabilities, or values.
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
    """The input of one training forward pass."""

    images: (
        Tensor  # (B, C, H, W), augmented and normalised; with views, (V·B, C, H, W), one view of all after the other
    )
    targets: Tensor  # (B, K)
    numbers: Tensor  # (B,), indices in the training split
    local: Tensor | None = None  # small views, (L·B, C, h, w), of multi-crop methods


class Reconstruction(NamedTuple):
    """Images as a model got them and as it predicts them: (B, C, H, W), normalised."""

    original: Tensor
    masked: Tensor  # masked pixels are NaN
    predicted: Tensor  # visible pixels as they are
    note: str = ""  # how to read the prediction


class Objective(nn.Module):
    """Base class of objectives. A subclass implements `compare`, and may override `show` and `lesson`.

    `ema` is the decay of the moving average of the weights; 0 disables it.

    The loss is a mean over the images of a batch, which several processes may share: what is not, such as a mean over
    labelled pixels, asks `world()` for the counts of the whole batch.
    """

    stagewise = True  # whether the stages of the model are called one by one, so that each can gather its own weights

    def __init__(self, model: Model, ema: float = 0.0):
        super().__init__()
        self.model = model
        self.ema = Ema(model, ema) if ema else None

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """The "loss" of a batch, and other values to log."""
        outputs = self.model(batch.images).float()
        return {"loss": self.compare(outputs, batch.targets), **self.show(outputs, batch.targets)}

    def compare(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of outputs against targets."""
        raise NotImplementedError

    def aims(self, targets: Tensor) -> Tensor:
        """The targets on the scale of the outputs, as an own loss gets them."""
        return targets

    def show(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Values to log besides the loss, such as the training accuracy."""
        return {}

    def lesson(self, outputs: Tensor, taught: Tensor, how: DistillConfig) -> dict[str, Tensor]:
        """The "loss" of outputs against a teacher's and, for classes and labels, the share that "agree".

        By default, the mean squared error between the outputs.
        """
        return {"loss": F.mse_loss(outputs, taught)}

    def examine(self, model: Model, images: Tensor) -> Tensor:
        """What validation measures, a row per image: the outputs of the kept model."""
        outputs: Tensor = model(images)
        return outputs

    def reconstruct(self, model: Model, images: Tensor) -> Reconstruction | None:
        """What a model makes of masked images; None for objectives that mask nothing."""
        return None

    def added(self) -> dict[str, nn.Module]:
        """Modules that learn with the model and are not part of it, by name, such as a decoder."""
        return {}

    def followers(self) -> dict[str, nn.Module]:
        """Moving averages of added modules, by the names of these, such as the head of a momentum teacher."""
        return {}

    def after_step(self, step: int) -> None:
        """Updates the moving average; called after every optimiser step."""
        if self.ema is not None:
            self.ema.update(self.model, step)

    def kept(self) -> Model:
        """The model to validate and save: averaged weights, LoRA adapters merged."""
        return merged(self._averaged)

    def parts(self) -> dict[str, Any]:
        """The objects whose state belongs in a checkpoint, by name."""
        return {"model": self.model, "kept": self._averaged, **self.added()}

    @property
    def _averaged(self) -> Model:
        return self.model if self.ema is None else self.ema.model


class CrossEntropy(Objective):
    """Cross-entropy for one class per image; `weights`, (K,), are class weights.

    With "bce", binary cross-entropy per class, summed over the classes.
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
    """Binary cross-entropy per label; `weights`, (K,), are those of positive targets."""

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
    """Mean squared error of standardised targets, so that values of any scale count equally."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: Model, mean: tuple[float, ...], std: tuple[float, ...], ema: float = 0.0):
        super().__init__(model, ema)
        self.register_buffer("mean", torch.tensor(mean))
        self.register_buffer("std", torch.tensor(std))

    def compare(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(outputs, self.aims(targets))

    def aims(self, targets: Tensor) -> Tensor:
        return (targets - self.mean) / self.std


def class_tensor(weights: NDArray[np.float32] | None, model: Model) -> Tensor | None:
    """Class weights on the device of a model."""
    return None if weights is None else torch.from_numpy(weights).to(next(model.parameters()).device)


def same_class(ours: Tensor, theirs: Tensor) -> Tensor:
    """The share of rows with the same argmax."""
    return (ours.detach().argmax(dim=1) == theirs.argmax(dim=1)).float().mean()


def weigh(targets: Tensor, weights: Tensor, smoothing: float) -> Tensor:
    """Smoothed targets, (B, K), with class weights applied as if before smoothing.

    Weights applied after smoothing would pull every image towards the rare classes: with 10 classes and a smoothing of
    0.1, a class of weight 50 would get half the mass of the image's own class.
    """
    even = smoothing / targets.shape[1]
    sharp = (targets - even) * weights
    return sharp + sharp.sum(dim=1, keepdim=True) * even / (1 - smoothing)
