"""The loss of segmentation: cross-entropy of the labelled pixels, with Dice or focal terms, and auxiliary losses.

Dice: https://arxiv.org/abs/1606.04797. Focal: https://arxiv.org/abs/1708.02002, with γ = 2.

Legend: B batch, K classes, (h, w) outputs, (H, W) labels.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.models import Model
from vitrail.tasks.mask_scores import IGNORE
from vitrail.tasks.objective import Batch, Objective
from vitrail.world import world

MaskLoss = Literal["ce", "dice", "focal"]
AUXILIARY = 0.4  # weight of auxiliary losses, as in mmsegmentation
GAMMA = 2.0  # of the focal loss


class SegmentationLoss(Objective):
    """The loss of logits, resized to the labels; `weights`, (K,), are class weights."""

    def __init__(self, model: Model, loss: MaskLoss = "ce", weights: Tensor | None = None, ema: float = 0.0):
        super().__init__(model, ema)
        self.loss: MaskLoss = loss
        self.weights = weights

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        main, *auxiliary = (outputs.float() for outputs in self.model.heads(batch.images))
        loss = self.compare(main, batch.targets)
        for outputs in auxiliary:
            loss = loss + AUXILIARY * self.compare(outputs, batch.targets)
        return {"loss": loss, **self.show(main, batch.targets)}

    def compare(self, outputs: Tensor, targets: Tensor) -> Tensor:
        logits, labels = resized(outputs, targets.shape[1:]), targets.long()
        seen = labels != IGNORE
        count = world().count(seen.sum())
        losses = F.cross_entropy(logits, labels, self.weights, ignore_index=IGNORE, reduction="none")  # B H W
        if self.loss == "focal":
            chance = (-F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="none")).exp()
            losses = losses * (1 - chance) ** GAMMA
        loss = losses.sum() / count
        return loss + dice_loss(logits, labels, seen) if self.loss == "dice" else loss

    def show(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            labels, seen = targets.long(), targets != IGNORE
            said = resized(outputs, targets.shape[1:]).argmax(dim=1)
            return {"accuracy": ((said == labels) & seen).sum() / world().count(seen.sum())}


def resized(logits: Tensor, size: torch.Size) -> Tensor:
    """Logits (B, K, h, w) at another size, bilinear."""
    if logits.shape[2:] == size:
        return logits
    return F.interpolate(logits, (size[0], size[1]), mode="bilinear", align_corners=False)


def dice_loss(logits: Tensor, labels: Tensor, seen: Tensor) -> Tensor:
    """1 minus the soft Dice, the mean over the classes that the batch has."""
    chances = logits.softmax(dim=1) * seen[:, None]
    true = F.one_hot(labels.clamp(min=0), logits.shape[1]).permute(0, 3, 1, 2) * seen[:, None]
    parts = ((chances * true).sum((0, 2, 3)), chances.sum((0, 2, 3)), true.sum((0, 2, 3)))
    both, said, labelled = world().total(torch.stack([part.to(logits.dtype) for part in parts]))
    total, there = said + labelled, labelled > 0
    shares = 1 - 2 * both / total.clamp(min=1)
    return (shares * there).sum() / there.sum().clamp(min=1)
