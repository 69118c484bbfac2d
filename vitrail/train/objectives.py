"""What is learnt: a module that takes a batch and returns its loss and what else to show.

Targets come as mixing and label smoothing make them: (B, K) shares of classes, chances of labels, or numbers.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.models import Model
from vitrail.weights import Card

Loss = Literal["ce", "bce"]


class MultiClass(nn.Module):
    """Cross-entropy: one class fits an image.

    With "bce" every class is a question by itself, and the loss of an image is the sum over the classes.
    """

    def __init__(self, model: Model, loss: Loss = "ce"):
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        logits = self.model(images).float()
        right = logits.detach().argmax(dim=1) == targets.argmax(dim=1)
        if self.loss == "bce":
            loss = F.binary_cross_entropy_with_logits(logits, targets, reduction="sum") / len(images)
        else:
            loss = F.cross_entropy(logits, targets)
        return {"loss": loss, "top1": right.float().mean()}


class MultiLabel(nn.Module):
    """Binary cross-entropy: every label is there or not, whatever the others."""

    def __init__(self, model: Model):
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        logits = self.model(images).float()
        return {"loss": F.binary_cross_entropy_with_logits(logits, targets)}


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


def build_objective(model: Model, card: Card, loss: Loss, device: str) -> nn.Module:
    """The objective of the model's task."""
    if card.task == "multilabel":
        return MultiLabel(model)
    if card.task == "regression":
        return Regression(model, card.target_mean, card.target_std).to(device)
    return MultiClass(model, loss)
