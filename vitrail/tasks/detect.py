"""From the outputs of box heads to detections: scores, the best candidates, non-maximum suppression."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

CANDIDATES = 300  # best predictions of an image before suppression
DETECTIONS = 100  # of an image
OVERLAP = 0.6  # IoU above which the lower-scored of two boxes of a class is removed


def detect(outputs: Tensor, classes: int) -> Tensor:
    """Outputs (B, Q, 4 + K), or (B, Q, 4 + K + 1) with "no object", as detections (B, 100, 6), best first.

    A detection is x0, y0, x1, y1, score and class. Missing ones have a score of 0. Dense outputs are suppressed; a set
    of predictions has no duplicates. The shapes are fixed, so that the whole exports as one graph.
    """
    import torch

    from vitrail.tasks.iou import suppress

    boxes, logits = outputs[..., :4], outputs[..., 4:]
    dense = logits.shape[-1] == classes
    if dense:
        scores = logits.sigmoid().flatten(1)  # B QK
        best, index = scores.topk(min(CANDIDATES, scores.shape[1]), dim=1)
        kinds, rows = index % classes, index // classes
    else:
        top, kind = logits.softmax(dim=-1)[..., :-1].max(dim=-1)
        best, rows = top.topk(min(DETECTIONS, top.shape[1]), dim=1)
        kinds = kind.gather(1, rows)
    boxes = boxes.gather(1, rows.unsqueeze(-1).expand(-1, -1, 4))
    if dense:
        best = best * suppress(boxes, kinds, OVERLAP)
        best, order = best.topk(min(DETECTIONS, best.shape[1]), dim=1)
        boxes = boxes.gather(1, order.unsqueeze(-1).expand(-1, -1, 4))
        kinds = kinds.gather(1, order)
    return torch.cat([boxes, best.unsqueeze(-1), kinds.unsqueeze(-1).to(boxes.dtype)], dim=-1)
