"""COCO's average precision and recall of boxes, as pycocotools computes them.

For each class, detections of all images are sorted by score. At each IoU threshold a detection matches the free object
that it overlaps most; precision, made monotone, is averaged over 101 recalls, then over ten thresholds from 0.5 to 0.95
and over the classes that have objects. Ignored objects (COCO's crowds, VOC's difficult objects) and objects outside a
range of areas neither help nor harm: a detection that matches one leaves the count. Any number may match an ignored
one, and the IoU with it is relative to the area of the detection.

Legend: D detections and G objects of one image and class, T thresholds, A ranges of area, R recalls, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitrail.tasks.scores import Floats, Numbers

THRESHOLDS = np.linspace(0.5, 0.95, 10)
RECALLS: Floats = np.linspace(0.0, 1.0, 101, dtype=np.float64)
AREAS = {"all": (0.0, 1e10), "small": (0.0, 32.0**2), "medium": (32.0**2, 96.0**2), "large": (96.0**2, 1e10)}
MOST = (1, 10, 100)  # detections per image and class

_RANGES: Floats = np.array(list(AREAS.values()), np.float64)
_LOW, _HIGH = _RANGES[:, :1], _RANGES[:, 1:]  # A 1


@dataclass(frozen=True, eq=False)
class Matched:
    """The detections of one image and class, sorted by score, against its objects."""

    scores: Floats  # D
    hits: NDArray[np.bool_]  # A T D: matched an object
    ignored: NDArray[np.bool_]  # A T D: counts neither as right nor as wrong
    objects: Numbers  # A: objects that count


@dataclass(frozen=True, eq=False)
class Precision:
    """Precision and recall of each class; NaN for classes without objects."""

    precision: Floats  # T R K A, at 100 detections
    recall: Floats  # T K A M, for each of MOST

    def ap(self, threshold: float | None = None, area: str = "all") -> float:
        """Average precision, at one IoU threshold or over all; NaN without objects."""
        return _mean(self._at(threshold)[..., list(AREAS).index(area)])

    def ar(self, most: int = 100, area: str = "all") -> float:
        """Average recall over all thresholds."""
        return _mean(self.recall[:, :, list(AREAS).index(area), MOST.index(most)])

    def class_ap(self, threshold: float | None = None) -> Floats:
        """Average precision of each class, (K,)."""
        values: Floats = self._at(threshold)[..., 0].mean(axis=(0, 1))
        return values

    def curve(self, threshold: float = 0.5) -> Floats:
        """Precision at each of RECALLS, (R, K)."""
        values: Floats = self._at(threshold)[0, :, :, 0]
        return values

    def _at(self, threshold: float | None) -> Floats:
        return self.precision if threshold is None else self.precision[np.isclose(THRESHOLDS, threshold)]


def overlaps(boxes: Floats, objects: Floats, ignored: NDArray[np.bool_]) -> Floats:
    """IoU of boxes (D, 4) and objects (G, 4), as x0, y0, x1, y1: (D, G); with ignored objects, over the box alone."""
    size = np.minimum(boxes[:, None, 2:], objects[None, :, 2:]) - np.maximum(boxes[:, None, :2], objects[None, :, :2])
    both = np.where((size > 0).all(axis=2), size[..., 0] * size[..., 1], 0.0)
    area = _area(boxes)[:, None]
    union = np.where(ignored[None], area, area + _area(objects)[None] - both)
    values: Floats = np.divide(both, union, out=np.zeros_like(both), where=both > 0)
    return values


def match(
    boxes: Floats, scores: Floats, objects: Floats, ignored: NDArray[np.bool_], areas: Floats | None = None
) -> Matched:
    """Matches the detections of one image and class with its objects, at every threshold and for every area.

    `areas` are those of the objects where they differ from their boxes', such as the pixels of their masks.
    """
    order = np.argsort(-scores, kind="stable")[: MOST[-1]]
    boxes, scores = boxes[order], scores[order]
    skip = _outside(_area(objects) if areas is None else areas) | ignored  # A G
    shape = len(AREAS), len(THRESHOLDS), len(boxes)
    hits, out = np.zeros(shape, bool), np.zeros(shape, bool)
    if len(objects):
        iou = overlaps(boxes, objects, ignored)
        taken = np.zeros((*shape[:2], len(objects)), bool)
        least = np.minimum(THRESHOLDS, 1 - 1e-10)[None, :, None]
        counts = np.broadcast_to(~skip[:, None], taken.shape)
        for d in range(len(boxes)):
            free = (iou[d] >= least) & (~taken | ignored)
            # The object with the largest IoU, the last one of equals; one that is ignored only if there is no other.
            first = free & counts
            some = np.asarray(first.any(axis=2))
            free = np.where(some[..., None], first, free)
            best = len(objects) - 1 - np.where(free, iou[d], -1.0)[..., ::-1].argmax(axis=2)
            found = np.asarray(free.any(axis=2))
            hits[..., d] = found
            out[..., d] = found & ~some
            np.put_along_axis(
                taken, best[..., None], found[..., None] | np.take_along_axis(taken, best[..., None], 2), 2
            )
    out |= ~hits & _outside(_area(boxes))[:, None]
    return Matched(scores, hits, out, (~skip).sum(axis=1))


def accumulate(classes: Sequence[Sequence[Matched]]) -> Precision:
    """Precision and recall, from the matches of every image for each class."""
    shape = len(THRESHOLDS), len(classes), len(AREAS)
    precision = np.full((shape[0], len(RECALLS), *shape[1:]), np.nan)
    recall = np.full((*shape, len(MOST)), np.nan)
    for k, images in enumerate(classes):
        objects = sum((image.objects for image in images), np.zeros(len(AREAS), np.int64))
        for m, most in enumerate(MOST):
            scores = np.concatenate([np.zeros(0), *(image.scores[:most] for image in images)])
            order = np.argsort(-scores, kind="stable")
            none = np.zeros((*(len(AREAS), len(THRESHOLDS)), 0), bool)
            hits = np.concatenate([none, *(image.hits[..., :most] for image in images)], axis=2)[..., order]
            out = np.concatenate([none, *(image.ignored[..., :most] for image in images)], axis=2)[..., order]
            right, wrong = (np.cumsum(part & ~out, axis=2, dtype=np.float64) for part in (hits, ~hits))
            for a in np.flatnonzero(objects):
                for t in range(len(THRESHOLDS)):
                    found = right[a, t] / objects[a]
                    recall[t, k, a, m] = found[-1] if len(found) else 0.0
                    if most == MOST[-1]:
                        share = right[a, t] / (right[a, t] + wrong[a, t] + np.spacing(1))
                        share = np.maximum.accumulate(share[::-1])[::-1]
                        at = np.searchsorted(found, RECALLS, side="left")
                        precision[t, :, k, a] = np.append(share, 0.0)[at]
    return Precision(precision, recall)


def best_threshold(images: Sequence[Matched]) -> tuple[float, float, float, float]:
    """The score from which on to report a class, with its F1, precision and recall at an IoU of 0.5.

    It maximises F1, and lies between two scores. Without detections or objects it is 0.5, and all else 0.
    """
    objects = int(sum(image.objects[0] for image in images))
    scores = np.concatenate([np.zeros(0), *(image.scores for image in images)])
    hits = np.concatenate([np.zeros(0, bool), *(image.hits[0, 0] for image in images)])
    out = np.concatenate([np.zeros(0, bool), *(image.ignored[0, 0] for image in images)])
    scores, hits = scores[~out], hits[~out]
    if not objects or not hits.any():
        return 0.5, 0.0, 0.0, 0.0
    order = np.argsort(-scores, kind="stable")
    scores, right = scores[order], np.cumsum(hits[order])
    f1 = 2 * right / (np.arange(1, len(scores) + 1) + objects)
    f1[:-1][scores[:-1] == scores[1:]] = -1  # equal scores are reported together
    at = int(f1.argmax())
    threshold = (scores[at] + scores[at + 1]) / 2 if at + 1 < len(scores) else scores[at] / 2
    return float(threshold), float(f1[at]), float(right[at] / (at + 1)), float(right[at] / objects)


def _area(boxes: Floats) -> Floats:
    area: Floats = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    return area


def _outside(area: Floats) -> NDArray[np.bool_]:
    """Whether each box is outside each range of areas, (A, n)."""
    beyond: NDArray[np.bool_] = np.logical_or(area[None] < _LOW, area[None] > _HIGH)
    return beyond


def _mean(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else float("nan")
