"""The scores of a segmentation, from one confusion matrix over the pixels of all images, and its meter.

mIoU is the mean over classes of IoU = TP / (TP + FP + FN) of all pixels, never the mean over images. Pixels without a
label count nowhere. The boundary F-score is that of Csurka et al. (BMVC 2013): the share of boundary pixels of one mask
that are within 0.75 % of the image's diagonal of a boundary of the same class in the other, as precision and recall.

Legend: K classes, (H, W) image.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.errors import UserError
from vitrail.tasks.arrays import logsumexp
from vitrail.tasks.placement import Truth
from vitrail.tasks.scores import Floats, Meter, NotFinite, Numbers, Scores, Targets, files_line, rounded

Labels = NDArray[np.integer[Any]]

IGNORE = -1  # label of pixels that count nowhere
NEAR = 0.0075  # of the diagonal: how close boundaries must be


@dataclass(frozen=True)
class MaskScore:
    """The scores of a class."""

    name: str
    iou: float
    accuracy: float
    dice: float
    boundary: float
    share: float  # of the labelled pixels
    support: int  # labelled pixels


@dataclass(frozen=True, eq=False, kw_only=True)
class MaskScores(Scores):
    """Segmentation scores. Rows of the confusion matrix are true classes."""

    miou: float
    accuracy: float  # share of pixels
    mean_accuracy: float
    dice: float
    boundary: float
    per_class: list[MaskScore]
    confusion: Numbers

    @property
    def main(self) -> float:
        return self.miou

    def by(self, best: str | None) -> tuple[float, float]:
        return (self.dice, 0.0) if best == "dice" else super().by(best)

    @property
    def each(self) -> list[MaskScore]:
        return self.per_class

    def row(self) -> dict[str, float]:
        return {
            "loss": self.loss,
            "miou": self.miou,
            "dice": self.dice,
            "accuracy": self.accuracy,
            "mean_accuracy": self.mean_accuracy,
            "boundary": self.boundary,
        }

    def to_json(self) -> dict[str, Any]:
        return self.summary() | {
            "per_class": [rounded(asdict(score)) for score in self.per_class],
            "confusion": self.confusion.tolist(),
        }

    def csv(self) -> dict[str, list[list[object]]]:
        names = [score.name for score in self.per_class]
        rows = [[name, *row] for name, row in zip(names, self.confusion.tolist(), strict=True)]
        fields = ("iou", "accuracy", "dice", "boundary", "share")
        each = [[s.name, *(f"{getattr(s, field):.6f}" for field in fields), s.support] for s in self.per_class]
        return {
            "confusion": [["true \\ predicted", *names], *rows],
            "per_class": [["class", *fields, "pixels"], *each],
        }

    def table(self, most: int = 20) -> str:
        lines = [
            f"images             {self.images:>7,}",
            f"mIoU               {self.miou:>7.2%}",
            f"mean Dice          {self.dice:>7.2%}",
            f"pixel accuracy     {self.accuracy:>7.2%}",
            f"mean accuracy      {self.mean_accuracy:>7.2%}",
            f"boundary F         {self.boundary:>7.2%}",
            f"loss               {self.loss:>7.4f}",
        ]
        return "\n".join([*lines, "", *_class_lines(self.per_class, most), *files_line(self.folder)])


def _class_lines(scores: Sequence[MaskScore], most: int) -> list[str]:
    """One line per class, or for the `most` with the lowest IoU."""
    lines = []
    if len(scores) > most:
        lines.append(f"The {most} classes of {len(scores)} with the lowest IoU:")
        scores = sorted(scores, key=lambda score: score.iou)[:most]
    width = max(len("class"), *(len(score.name) for score in scores))
    lines.append(f"{'class':<{width}}     IoU    Dice  accuracy  boundary F  pixels")
    return lines + [
        f"{s.name:<{width}}  {s.iou:>6.1%}  {s.dice:>6.1%}  {s.accuracy:>8.1%}  {s.boundary:>10.1%}  {s.share:>6.1%}"
        for s in scores
    ]


class MaskMeter(Meter):
    """Accumulates the confusion of pixels, at the size of the original images."""

    def __init__(self, classes: tuple[str, ...]):
        count = len(classes)
        self._classes = classes
        self._confusion = np.zeros((count, count), np.int64)
        self._losses: list[float] = []
        self._boundary = np.zeros((2, count))  # by class: the sum of F-scores, and the images that have the class

    def add(self, outputs: NDArray[np.floating], targets: Targets) -> None:
        if not np.isfinite(outputs).all():
            raise NotFinite("The model's outputs must be finite, but some are not: the weights diverged.")
        for logits, truth in zip(outputs, targets, strict=True):
            labels, restored = truth.annotation.labels(), original(logits, truth)
            said = restored.argmax(axis=0)
            self._confusion += confusion(labels, said, len(self._classes))
            self._losses.append(pixel_loss(restored, labels))
            self._boundary += boundary_scores(labels, said, len(self._classes))

    def merge(self, other: MaskMeter) -> None:
        self._confusion += other._confusion
        self._losses += other._losses
        self._boundary += other._boundary

    def scores(self) -> MaskScores:
        if not self._losses:
            raise UserError("The split has no images to measure.")
        losses = np.array(self._losses)
        return scores_of(self._classes, self._confusion, losses[np.isfinite(losses)], len(losses), self._boundary)


def scores_of(classes: tuple[str, ...], counts: Numbers, losses: Floats, images: int, boundary: Floats) -> MaskScores:
    """The scores of a confusion matrix; classes that neither the labels nor the predictions have do not count."""
    hits, true, said = counts.diagonal(), counts.sum(axis=1), counts.sum(axis=0)
    union = true + said - hits
    iou, dice = hits / np.maximum(union, 1), 2 * hits / np.maximum(true + said, 1)
    accuracy, edges = hits / np.maximum(true, 1), boundary[0] / np.maximum(boundary[1], 1)
    there, labelled = union > 0, max(int(true.sum()), 1)
    return MaskScores(
        images=images,
        loss=float(losses.mean()) if len(losses) else 0.0,
        loss_error=float(losses.std() / max(len(losses), 1) ** 0.5) if len(losses) else 0.0,
        miou=_mean(iou, there),
        accuracy=float(hits.sum() / labelled),
        mean_accuracy=_mean(accuracy, true > 0),
        dice=_mean(dice, there),
        boundary=_mean(edges, boundary[1] > 0),
        per_class=[
            MaskScore(
                name,
                iou=float(iou[k]),
                accuracy=float(accuracy[k]),
                dice=float(dice[k]),
                boundary=float(edges[k]),
                share=float(true[k] / labelled),
                support=int(true[k]),
            )
            for k, name in enumerate(classes)
        ],
        confusion=counts,
    )


def restored_scores(document: Mapping[str, Any]) -> MaskScores:
    """The scores in a `metrics.json`."""
    names = ("images", "loss", "miou", "accuracy", "mean_accuracy", "dice", "boundary")
    return MaskScores(
        **{name: document[name] for name in names},
        per_class=[MaskScore(**score) for score in document["per_class"]],
        confusion=np.array(document["confusion"], np.int64),
    )


def _mean(values: Floats, there: NDArray[np.bool_]) -> float:
    return float(values[there].mean()) if there.any() else 0.0


def original(logits: NDArray[np.floating], truth: Truth) -> NDArray[np.float32]:
    """Logits (K, h, w) of an input at the size of the original image: (K, H, W)."""
    return truth.placement.restore(logits)


def confusion(labels: Labels, said: Labels, classes: int) -> Numbers:
    """Pixels by true and predicted class, (K, K); unlabelled ones are left out."""
    seen = labels != IGNORE
    cells = labels[seen].astype(np.int64) * classes + said[seen]
    return np.bincount(cells, minlength=classes**2).reshape(classes, classes)


def pixel_loss(logits: NDArray[np.float32], labels: Labels) -> float:
    """The mean cross-entropy of the labelled pixels; NaN if there are none."""
    seen = labels != IGNORE
    if not seen.any():
        return float("nan")
    own, picked = labels[seen].astype(np.int64), logits[:, seen].T  # pixels, K
    return float((logsumexp(picked) - np.take_along_axis(picked, own[:, None], axis=1)[:, 0]).mean())


def boundary_scores(labels: Labels, said: Labels, classes: int) -> Floats:
    """The boundary F-score of each class of one image, 0 without it, and whether there is one: (2, K)."""
    found = np.zeros((2, classes))
    reach = max(round(NEAR * math.hypot(*labels.shape)), 1)
    seen = labels != IGNORE
    for k in np.unique(labels[seen]).tolist():
        true, given = _edges(labels == k), _edges((said == k) & seen)
        if not true.any():  # a class that fills the image has no boundary
            continue
        recall = float(_grown(given, reach)[true].mean())
        precision = float(_grown(true, reach)[given].mean()) if given.any() else 0.0
        found[:, k] = 2 * precision * recall / max(precision + recall, 1e-12), 1
    return found


def _edges(region: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The pixels of a region that touch another, above, below, left or right."""
    edges = np.zeros_like(region)
    down, right = region[1:] != region[:-1], region[:, 1:] != region[:, :-1]
    edges[1:] |= down
    edges[:-1] |= down
    edges[:, 1:] |= right
    edges[:, :-1] |= right
    return edges & region


def _grown(region: NDArray[np.bool_], reach: int) -> NDArray[np.bool_]:
    """The pixels within `reach` rows and columns of a region."""
    for axis in (0, 1):
        pad = [(reach + 1, reach) if i == axis else (0, 0) for i in (0, 1)]
        sums = np.pad(region, pad).cumsum(axis=axis, dtype=np.int32)
        high, low = (np.take(sums, np.arange(region.shape[axis]) + at, axis=axis) for at in (2 * reach + 1, 0))
        region = high > low
    return region
