"""What is learnt: a module that takes a batch and returns its loss and what else to show."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.models import Model


class Supervised(nn.Module):
    """Cross-entropy against target distributions, as mixing and label smoothing make them.

    With `weights`, (K,), every class has its own in the loss.
    """

    def __init__(self, model: Model, weights: Tensor | None = None, smoothing: float = 0.0):
        super().__init__()
        self.model = model
        self.weights = weights
        self.smoothing = smoothing

    def forward(self, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        logits = self.model(images).float()
        right = logits.detach().argmax(dim=1) == targets.argmax(dim=1)
        if self.weights is not None:
            targets = weigh(targets, self.weights, self.smoothing)
        return {"loss": F.cross_entropy(logits, targets), "top1": right.float().mean()}


def weigh(targets: Tensor, weights: Tensor, smoothing: float) -> Tensor:
    """Targets, (B, K), multiplied by the weights of their classes as if before they were smoothed.

    To weigh smoothed targets would make every image pull towards the rare classes: of one that weighs 50, the little
    that smoothing gives it is half of what the image's own class has.
    """
    even = smoothing / targets.shape[1]
    sharp = (targets - even) * weights
    return sharp + sharp.sum(dim=1, keepdim=True) * even / (1 - smoothing)
