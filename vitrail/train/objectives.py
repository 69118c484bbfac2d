"""What is learnt: a module that takes a batch and returns its loss and what else to show.

Targets come as mixing and label smoothing make them: (B, K) shares of classes, chances of labels, or numbers.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import TrainConfig
from vitrail.data.balance import class_weights
from vitrail.data.dataset import Targets
from vitrail.models import Model
from vitrail.weights import Card

Loss = Literal["ce", "bce"]


class MultiClass(nn.Module):
    """Cross-entropy: one class fits an image. With `weights`, (K,), every class has its own in the loss.

    With "bce" every class is a question by itself, and the loss of an image is the sum over the classes.
    """

    def __init__(self, model: Model, loss: Loss = "ce", weights: Tensor | None = None, smoothing: float = 0.0):
        super().__init__()
        self.model = model
        self.loss = loss
        self.weights = weights
        self.smoothing = smoothing

    def forward(self, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        logits = self.model(images).float()
        right = logits.detach().argmax(dim=1) == targets.argmax(dim=1)
        if self.loss == "bce":
            weights = None if self.weights is None else targets @ self.weights[:, None]  # of every image: B 1
            loss = F.binary_cross_entropy_with_logits(logits, targets, weights, reduction="sum") / len(images)
        else:
            if self.weights is not None:
                targets = weigh(targets, self.weights, self.smoothing)
            loss = F.cross_entropy(logits, targets)
        return {"loss": loss, "top1": right.float().mean()}


def weigh(targets: Tensor, weights: Tensor, smoothing: float) -> Tensor:
    """Targets, (B, K), multiplied by the weights of their classes as if before they were smoothed.

    To weigh smoothed targets would make every image pull towards the rare classes: of one that weighs 50, the little
    that smoothing gives it is half of what the image's own class has.
    """
    even = smoothing / targets.shape[1]
    sharp = (targets - even) * weights
    return sharp + sharp.sum(dim=1, keepdim=True) * even / (1 - smoothing)


class MultiLabel(nn.Module):
    """Binary cross-entropy: every label is there or not, whatever the others.

    With `weights`, (K,), the images that have a label count so many times.
    """

    def __init__(self, model: Model, weights: Tensor | None = None):
        super().__init__()
        self.model = model
        self.weights = weights

    def forward(self, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        logits = self.model(images).float()
        return {"loss": F.binary_cross_entropy_with_logits(logits, targets, pos_weight=self.weights)}


class Regression(nn.Module):
    """Squared error in standard deviations of the training set, so that numbers of any size are learnt alike."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: Model, mean: tuple[float, ...], std: tuple[float, ...]):
        super().__init__()
        self.model = model
        self.register_buffer("mean", torch.tensor(mean))
        self.register_buffer("std", torch.tensor(std))

    def forward(self, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        outputs = self.model(images).float()
        return {"loss": F.mse_loss(outputs, (targets - self.mean) / self.std)}


def build_objective(model: Model, card: Card, config: TrainConfig, targets: Targets) -> nn.Module:
    """The objective of the model's task, for training images with these targets."""
    weights = None
    if config.source.class_weights:
        weights = torch.from_numpy(class_weights(targets, len(card.classes))).to(config.run.device)
    if card.task == "multilabel":
        return MultiLabel(model, weights)
    if card.task == "regression":
        return Regression(model, card.target_mean, card.target_std).to(config.run.device)
    return MultiClass(model, config.optim.loss, weights, config.augment.smoothing)
