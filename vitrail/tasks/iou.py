"""Overlap of boxes: IoU, GIoU, and non-maximum suppression, as tensor operations that also export to a graph.

A box is (x0, y0, x1, y1). Legend: B batch, N and M boxes, C candidates, K classes.
"""

from __future__ import annotations

import torch
from torch import Tensor


def area(boxes: Tensor) -> Tensor:
    """The area of boxes (…, 4); 0 where corners are swapped."""
    size = (boxes[..., 2:] - boxes[..., :2]).clamp(min=0)
    return size[..., 0] * size[..., 1]


def _overlap(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Intersection and union of boxes whose leading dimensions broadcast."""
    shared = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])).clamp(min=0)
    both = shared[..., 0] * shared[..., 1]
    return both, area(a) + area(b) - both


def iou(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union, box by box; two boxes without area have 0."""
    both, union = _overlap(a, b)
    return both / union.clamp(min=torch.finfo(union.dtype).tiny)


def giou(a: Tensor, b: Tensor) -> Tensor:
    """Generalised IoU (https://arxiv.org/abs/1902.09630), box by box: from -1 for boxes far apart to 1."""
    both, union = _overlap(a, b)
    hull = area(torch.cat([torch.minimum(a[..., :2], b[..., :2]), torch.maximum(a[..., 2:], b[..., 2:])], dim=-1))
    tiny = torch.finfo(union.dtype).tiny
    return both / union.clamp(min=tiny) - (hull - union) / hull.clamp(min=tiny)


def pairs(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Boxes (…, N, 4) and (…, M, 4), shaped so that functions of boxes give (…, N, M)."""
    return a.unsqueeze(-2), b.unsqueeze(-3)


def centred(boxes: Tensor) -> Tensor:
    """Boxes by their centre and size: (cx, cy, w, h)."""
    low, high = boxes[..., :2], boxes[..., 2:]
    return torch.cat([(low + high) / 2, high - low], dim=-1)


def suppress(boxes: Tensor, classes: Tensor, threshold: float) -> Tensor:
    """Greedy non-maximum suppression within each class: whether each of (B, C) boxes is kept.

    Boxes (B, C, 4) are in descending order of their scores. A box goes if a kept box before it overlaps it by more
    than `threshold`. A graph has the loop over boxes as one operator, which every runtime has.
    """
    same = classes.unsqueeze(-1) == classes.unsqueeze(-2)
    removes = ((iou(*pairs(boxes, boxes)) > threshold) & same).float().triu(diagonal=1)  # B C C: row removes column
    keep = torch.ones_like(boxes[..., 0])
    rows = torch.eye(boxes.shape[-2], device=boxes.device), removes.transpose(0, 1)
    if torch.compiler.is_exporting():
        from torch._higher_order_ops.scan import scan  # slow to import

        return scan(_suppress_by_one, keep, rows)[0] > 0.5
    for row in zip(*rows, strict=True):
        keep, _ = _suppress_by_one(keep, row)
    return keep > 0.5


def _suppress_by_one(keep: Tensor, row: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Which boxes are kept, (B, C), after one of them, of which `row` has the place, (C,), and what it removes, (B, C).

    Also whether that box itself is kept, (B, 1).
    """
    place, removed = row
    kept = (keep * place).sum(dim=-1, keepdim=True)
    return keep * (1 - kept * removed), kept
