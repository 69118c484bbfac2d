"""What is learnt: a module that takes a batch and returns its loss and what else to show."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.models import Model


class Supervised(nn.Module):
    """Cross-entropy against target distributions, as mixing and label smoothing make them.

    With "bce" every class is a question by itself, and the loss of an image is the sum over the classes.
    """

    def __init__(self, model: Model, loss: Literal["ce", "bce"] = "ce"):
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
