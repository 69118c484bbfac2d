"""What is learnt: a module that takes a batch and returns its loss and what else to show."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.models import Model


class Supervised(nn.Module):
    """Cross-entropy against target distributions, as mixing and label smoothing make them."""

    def __init__(self, model: Model):
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        logits = self.model(images).float()
        right = logits.detach().argmax(dim=1) == targets.argmax(dim=1)
        return {"loss": F.cross_entropy(logits, targets), "top1": right.float().mean()}
