"""The loss of dense box heads: which points answer for which object, and what they learn.

As in FCOS (https://arxiv.org/abs/1904.01355), a point is positive if it lies inside an object and near its centre; of
several objects the smallest wins. Instead of a separate centre-ness, the class score itself learns how well the
predicted box fits (quality focal loss, https://arxiv.org/abs/2006.04388), so that the best placed boxes rank first. It
aims at (1 + IoU) / 2 rather than at the IoU, and in the loss of boxes every object counts the same however many points
it has: otherwise small objects, whose boxes fit last, are not learnt for a long time.

Legend: B batch, Q points, M objects per image, padded, K classes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.tasks.iou import area, giou, iou
from vitrail.world import world

RADIUS = 1.5  # strides around the centre of an object within which points are positive
BOX_WEIGHT = 2.0  # of the GIoU loss against the classification loss


def assign(points: Tensor, objects: Tensor) -> tuple[Tensor, Tensor]:
    """The object that each point answers for, (B, Q), -1 for none, and whether the point is left out of the loss.

    `points` (Q, 5) are x, y, the stride, and the smallest and largest object of the point's level by its longest side.
    `objects` (B, M, 6) are class, corners and whether to ignore; the class of padding is -1.
    """
    kind, boxes, ignored = objects[..., 0], objects[..., 1:5], objects[..., 5] > 0
    x, y, stride, least, most = (points[:, i, None] for i in range(5))  # Q 1
    low, high = boxes[:, None, :, :2], boxes[:, None, :, 2:]  # B 1 M 2
    place = torch.stack([x, y], dim=-1)  # Q 1 2
    inside = ((place > low) & (place < high)).all(dim=-1)  # B Q M
    near = ((place - (low + high) / 2).abs() < RADIUS * stride[..., None]).all(dim=-1)
    longest = (high - low).amax(dim=-1)
    fits = (longest >= least) & (longest < most)
    real = (kind >= 0)[:, None]
    positive = inside & near & fits & real & ~ignored[:, None]
    size = torch.where(positive, area(boxes)[:, None], torch.inf)
    smallest, owner = size.min(dim=-1)
    owner = torch.where(smallest.isinf(), -1, owner)
    left_out = (inside & real & ignored[:, None]).any(dim=-1) & (owner < 0)
    return owner, left_out


def dense_loss(outputs: Tensor, points: Tensor, objects: Tensor) -> dict[str, Tensor]:
    """The loss of outputs (B, Q, 4 + K), boxes in pixels and class logits, against objects (B, M, 6)."""
    boxes, logits = outputs[..., :4], outputs[..., 4:]
    owner, left_out = assign(points, objects)
    positive = owner >= 0
    matched = objects.take_along_dim(owner.clamp(min=0)[..., None], dim=1)  # B Q 6
    count = world().count(positive.sum())

    quality = torch.zeros_like(logits)
    with torch.no_grad():
        overlap = iou(boxes, matched[..., 1:5])
        aim = ((1 + overlap) / 2).where(positive, 0.0)
        quality.scatter_(-1, matched[..., :1].long().clamp(min=0), aim[..., None])
    focal = (quality - logits.sigmoid()).abs() ** 2
    classify = F.binary_cross_entropy_with_logits(logits, quality, reduction="none") * focal
    classify = classify.sum(dim=-1).where(~left_out, 0.0).sum() / count

    shared = torch.zeros_like(objects[..., 0]).scatter_add_(1, owner.clamp(min=0), positive.to(boxes.dtype))  # B M
    weight = (1 / shared.take_along_dim(owner.clamp(min=0), dim=1).clamp(min=1)).where(positive, 0.0)  # B Q
    place = ((1 - giou(boxes, matched[..., 1:5])).where(positive, 0.0) * weight).sum() / world().count(weight.sum())
    return {"loss": classify + BOX_WEIGHT * place, "loss_class": classify, "loss_box": place}
