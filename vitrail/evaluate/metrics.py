"""What a classifier's logits are worth: accuracy, loss, every class by itself, confusion and calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.errors import UserError

BINS = 15


@dataclass(frozen=True)
class ClassScore:
    name: str
    precision: float
    recall: float
    f1: float
    support: int


@dataclass(frozen=True)
class Bin:
    """The predictions of like confidence; one without any has the middle of its range as confidence."""

    confidence: float
    accuracy: float
    count: int


@dataclass(frozen=True, eq=False)
class Metrics:
    """How well images were classified. Shares are from 0 to 1; rows of the confusion are true classes."""

    images: int
    top1: float
    top5: float
    loss: float
    ece: float
    per_class: list[ClassScore]
    confusion: NDArray[np.int64]
    bins: list[Bin]
    folder: Path | None = None  # where `evaluate` left the files

    def summary(self) -> dict[str, float]:
        """The numbers that stand for the whole."""
        scalars = {"top1": self.top1, "top5": self.top5, "loss": self.loss, "ece": self.ece}
        return {"images": self.images} | _rounded(scalars)

    def to_json(self) -> dict[str, Any]:
        """Everything, in types that JSON knows."""
        return self.summary() | {
            "per_class": [_rounded(asdict(score)) for score in self.per_class],
            "confusion": self.confusion.tolist(),
            "bins": [_rounded(asdict(bin)) for bin in self.bins],
        }

    def table(self, most: int = 20) -> str:
        """The numbers for people: the whole, then every class, or the `most` that are recognised worst."""
        lines = [
            f"images             {self.images:>7,}",
            f"top-1              {self.top1:>7.2%}",
            f"top-5              {self.top5:>7.2%}",
            f"loss               {self.loss:>7.4f}",
            f"calibration error  {self.ece:>7.2%}",
            "",
        ]
        shown = self.per_class
        if len(shown) > most:
            shown = sorted(shown, key=lambda score: score.f1)[:most]
            lines.append(f"The {most} classes of {len(self.per_class)} with the lowest F1:")
        width = max(len("class"), *(len(score.name) for score in shown))
        lines.append(f"{'class':<{width}}  precision  recall      F1  images")
        lines += [
            f"{s.name:<{width}}  {s.precision:>9.1%}  {s.recall:>6.1%}  {s.f1:>6.1%}  {s.support:>6,}" for s in shown
        ]
        if self.folder is not None:
            lines += ["", f"Figures and tables are in {self.folder}"]
        return "\n".join(lines)


def measure(logits: NDArray[np.floating], labels: NDArray[np.integer], classes: Sequence[str]) -> Metrics:
    """Compares logits, (N, K), with true labels, (N,). Top-5 counts the first min(5, K) classes."""
    assert logits.shape == (len(labels), len(classes)), (logits.shape, len(labels), len(classes))
    if not len(labels):
        raise UserError("There is nothing to measure: the split holds no images.")
    if not np.isfinite(logits).all():
        bad = int((~np.isfinite(logits)).any(axis=1).sum())
        raise UserError(
            f"The model's outputs must be finite, but for {bad} of {len(labels)} images they are not: the "
            "weights diverged or are damaged. Take an earlier checkpoint."
        )
    logits = logits.astype(np.float64)
    own = logits[np.arange(len(labels)), labels]

    # Ties go to the class that comes first, as with argmax, so that top-1 agrees with the confusion matrix.
    earlier = np.arange(len(classes)) < labels[:, None]
    rank = ((logits > own[:, None]) | ((logits == own[:, None]) & earlier)).sum(axis=1)
    right = rank == 0

    highest = logits.max(axis=1)
    log_sum = np.log(np.exp(logits - highest[:, None]).sum(axis=1)) + highest
    bins = _reliability(np.exp(highest - log_sum), right)

    # Not by scikit-learn, which warns of "a regression problem" when classes are many and images few.
    confusion = np.zeros((len(classes), len(classes)), np.int64)
    np.add.at(confusion, (labels, logits.argmax(axis=1)), 1)
    hits, support, chosen = confusion.diagonal(), confusion.sum(axis=1), confusion.sum(axis=0)
    precision, recall = hits / np.maximum(chosen, 1), hits / np.maximum(support, 1)
    f1 = 2 * hits / np.maximum(chosen + support, 1)
    return Metrics(
        images=len(labels),
        top1=float(right.mean()),
        top5=float((rank < 5).mean()),
        loss=float((log_sum - own).mean()),
        ece=sum(b.count * abs(b.accuracy - b.confidence) for b in bins) / len(labels),
        per_class=[
            ClassScore(name, float(precision[i]), float(recall[i]), float(f1[i]), int(support[i]))
            for i, name in enumerate(classes)
        ],
        confusion=confusion,
        bins=bins,
    )


def _reliability(confidence: NDArray[np.float64], right: NDArray[np.bool_]) -> list[Bin]:
    """Bins of equal width over the confidence in the predicted class; a bin holds its upper edge."""
    index = np.clip(np.ceil(confidence * BINS).astype(int) - 1, 0, BINS - 1)
    return [
        Bin(float(confidence[inside].mean()), float(right[inside].mean()), int(inside.sum()))
        if (inside := index == i).any()
        else Bin((i + 0.5) / BINS, 0.0, 0)
        for i in range(BINS)
    ]


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in values.items()}
