"""From the outputs of box heads to detections: scores, the best candidates, non-maximum suppression.

`detect` is for tensors: its shapes are fixed, so that it exports as part of a graph. `detections` is for arrays: the
same without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vitrail.tasks.arrays import sigmoid, softmax
from vitrail.tasks.coco import overlaps
from vitrail.tasks.scores import Floats

if TYPE_CHECKING:
    from torch import Tensor

CANDIDATES = 300  # best predictions of an image before suppression
DETECTIONS = 100  # of an image
OVERLAP = 0.6  # IoU above which the lower-scored of two boxes of a class is removed


def detect(outputs: Tensor, classes: int) -> Tensor:
    """Outputs (B, Q, 4 + K), or (B, Q, 4 + K + 1) with "no object", as detections (B, 100, 6), best first.

    A detection is x0, y0, x1, y1, score and class. Missing ones have a score of 0. Dense outputs are suppressed; a set
    of predictions has no duplicates.
    """
    import torch

    from vitrail.tasks.iou import suppress

    logits = outputs[..., 4:]
    dense = logits.shape[-1] == classes
    if dense:
        scores = logits.sigmoid().flatten(1)  # B QK
        best, index = scores.topk(min(CANDIDATES, scores.shape[1]), dim=1)
        kinds, rows = index % classes, index // classes
    else:
        top, kind = logits.softmax(dim=-1)[..., :-1].max(dim=-1)
        best, rows = top.topk(min(DETECTIONS, top.shape[1]), dim=1)
        kinds = kind.gather(1, rows)
    boxes = _rows(outputs, rows)[..., :4]
    if dense:
        best = best * suppress(boxes, kinds, OVERLAP)
    found = torch.cat([boxes, best.unsqueeze(-1), kinds.unsqueeze(-1).to(boxes.dtype)], dim=-1)
    return _rows(found, best.topk(min(DETECTIONS, best.shape[1]), dim=1)[1]) if dense else found


def _rows(table: Tensor, rows: Tensor) -> Tensor:
    """Rows (B, R) of a table (B, Q, C), as they are: OpenVINO fails to gather a slice of columns."""
    return table.gather(1, rows.unsqueeze(-1).expand(-1, -1, table.shape[-1]))


def detections(outputs: NDArray[np.floating], classes: int) -> Floats:
    """`detect` of arrays."""
    boxes, logits = outputs[..., :4].astype(np.float64), outputs[..., 4:].astype(np.float64)
    choose, scores = (_suppressed, sigmoid(logits)) if logits.shape[-1] == classes else (_best, _shares(logits))
    return np.stack([choose(*pair) for pair in zip(boxes, scores, strict=True)])


def _shares(logits: Floats) -> Floats:
    """The probabilities of the classes without "no object"."""
    shares: Floats = softmax(logits.reshape(-1, logits.shape[-1])).reshape(logits.shape)[..., :-1]
    return shares


def _best(boxes: Floats, scores: Floats) -> Floats:
    """The likeliest class of each prediction of a set, best first."""
    kinds, best = scores.argmax(axis=1), scores.max(axis=1)
    order = np.argsort(-best, kind="stable")[:DETECTIONS]
    return np.column_stack([boxes[order], best[order], kinds[order]])


def _suppressed(boxes: Floats, scores: Floats) -> Floats:
    """The best of dense predictions, without those that overlap a better one of their class."""
    flat, classes = scores.ravel(), scores.shape[1]
    order = np.argsort(-flat, kind="stable")[:CANDIDATES]
    (rows, kinds), best = np.divmod(order, classes), flat[order]
    boxes, keep = boxes[rows], np.ones(len(order), bool)
    nothing = np.zeros(len(order), bool)
    removes = (overlaps(boxes, boxes, nothing) > OVERLAP) & (kinds[:, None] == kinds)
    for i in range(len(order)):
        if keep[i]:
            keep[i + 1 :] &= ~removes[i, i + 1 :]
    found = np.column_stack([boxes, best * keep, kinds])
    return found[np.argsort(~keep, kind="stable")[:DETECTIONS]]
