"""What a model's outputs are worth: the numbers of each task, over all images and for every class by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, logsumexp

from vitrail.errors import UserError, shortlist
from vitrail.weights import Card

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

    @property
    def main(self) -> float:
        return self.top1

    def row(self) -> dict[str, float]:
        """The numbers of an epoch in metrics.csv."""
        return {"loss": self.loss, "top1": self.top1, "top5": self.top5}

    def summary(self) -> dict[str, float]:
        """The numbers that stand for the whole."""
        scalars = {"top1": self.top1, "top5": self.top5, "loss": self.loss, "ece": self.ece}
        return {"images": self.images} | rounded(scalars)

    def to_json(self) -> dict[str, Any]:
        """Everything, in types that JSON knows."""
        return self.summary() | {
            "per_class": [rounded(asdict(score)) for score in self.per_class],
            "confusion": self.confusion.tolist(),
            "bins": [rounded(asdict(bin)) for bin in self.bins],
        }

    def csv(self) -> dict[str, list[list[object]]]:
        """The tables to keep, by the names of their files."""
        return class_tables(self.per_class, self.confusion)

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
        return "\n".join(lines + class_lines(self.per_class, most) + where(self.folder))


def class_tables(scores: Sequence[ClassScore], confusion: NDArray[np.int64]) -> dict[str, list[list[object]]]:
    """The confusion matrix and the scores of the classes as tables to keep, by the names of their files."""
    names = [score.name for score in scores]
    rows = [[name, *row] for name, row in zip(names, confusion.tolist(), strict=True)]
    numbers = [[s.name, f"{s.precision:.6f}", f"{s.recall:.6f}", f"{s.f1:.6f}", s.support] for s in scores]
    return {
        "confusion": [["true \\ predicted", *names], *rows],
        "per_class": [["class", "precision", "recall", "f1", "support"], *numbers],
    }


def class_lines(scores: Sequence[ClassScore], most: int) -> list[str]:
    """Every class in a line, or the `most` that are recognised worst."""
    lines = []
    if len(scores) > most:
        lines.append(f"The {most} classes of {len(scores)} with the lowest F1:")
        scores = sorted(scores, key=lambda score: score.f1)[:most]
    width = max(len("class"), *(len(score.name) for score in scores))
    lines.append(f"{'class':<{width}}  precision  recall      F1  images")
    return lines + [
        f"{s.name:<{width}}  {s.precision:>9.1%}  {s.recall:>6.1%}  {s.f1:>6.1%}  {s.support:>6,}" for s in scores
    ]


def each_image(
    logits: NDArray[np.floating], labels: NDArray[np.integer]
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """Of every image how many classes come before the true one, its cross-entropy, and the first one's probability."""
    own = logits[np.arange(len(labels)), labels]
    # Ties go to the class that comes first, as with argmax, so that top-1 agrees with the confusion matrix.
    earlier = np.arange(logits.shape[1]) < labels[:, None]
    rank = ((logits > own[:, None]) | ((logits == own[:, None]) & earlier)).sum(axis=1)
    log_sum = logsumexp(logits, axis=1)
    return rank, log_sum - own, np.exp(logits.max(axis=1) - log_sum)


def measure(logits: NDArray[np.floating], labels: NDArray[np.integer], classes: Sequence[str]) -> Metrics:
    """Compares logits, (N, K), with true labels, (N,). Top-5 counts the first min(5, K) classes."""
    _check(logits, labels, classes)
    logits = logits.astype(np.float64)
    rank, losses, confidence = each_image(logits, labels)
    right = rank == 0
    bins = _reliability(confidence, right)

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
        loss=float(losses.mean()),
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


# Multi-label ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LabelScore:
    """How well one label was found. Without an image that has it, average precision and recall are unknown."""

    name: str
    ap: float | None
    precision: float
    recall: float
    f1: float
    threshold: float  # the probability from which on the label is given
    support: int


@dataclass(frozen=True, eq=False)
class LabelMetrics:
    """How well the labels of images were found. Means over labels leave out those that no image has."""

    images: int
    map: float  # mean average precision
    macro_f1: float
    micro_f1: float
    loss: float
    per_label: list[LabelScore]
    probabilities: NDArray[np.float64] = field(repr=False)  # N K
    targets: NDArray[np.float32] = field(repr=False)  # N K
    chosen_here: bool  # whether the thresholds were chosen on these very images
    folder: Path | None = None

    @property
    def main(self) -> float:
        return self.map

    @property
    def unseen(self) -> list[str]:
        """The labels that no image has."""
        return [score.name for score in self.per_label if not score.support]

    def row(self) -> dict[str, float]:
        return {"loss": self.loss, "map": self.map, "macro_f1": self.macro_f1, "micro_f1": self.micro_f1}

    def summary(self) -> dict[str, float]:
        return {"images": self.images} | rounded(self.row())

    def to_json(self) -> dict[str, Any]:
        return self.summary() | {
            "per_label": [rounded(asdict(score)) for score in self.per_label],
            "thresholds_chosen_on_these_images": self.chosen_here,
        }

    def csv(self) -> dict[str, list[list[object]]]:
        rows = [list(rounded(asdict(score)).values()) for score in self.per_label]
        return {"per_label": [[f.name if f.name != "name" else "label" for f in fields(LabelScore)], *rows]}

    def table(self, most: int = 20) -> str:
        lines = [
            f"images             {self.images:>7,}",
            f"mAP                {self.map:>7.2%}",
            f"macro F1           {self.macro_f1:>7.2%}",
            f"micro F1           {self.micro_f1:>7.2%}",
            f"loss               {self.loss:>7.4f}",
            "",
        ]
        shown = self.per_label
        if len(shown) > most:
            shown = sorted(shown, key=lambda score: 2.0 if score.ap is None else score.ap)[:most]
            lines.append(f"The {most} labels of {len(self.per_label)} with the lowest average precision:")
        width = max(len("label"), *(len(score.name) for score in shown))
        lines.append(f"{'label':<{width}}  average precision  precision  recall      F1  threshold  images")
        lines += [
            f"{s.name:<{width}}  {'' if s.ap is None else f'{s.ap:.1%}':>17}  {s.precision:>9.1%}  {s.recall:>6.1%}  "
            f"{s.f1:>6.1%}  {s.threshold:>9.3f}  {s.support:>6,}"
            for s in shown
        ]
        if self.unseen:
            lines += ["", f"No image here has {shortlist(self.unseen, 5)}: left out of the means over labels."]
        chosen = "these images" if self.chosen_here else "the validation images of the run"
        lines += ["", f"Thresholds are those with the best F1 on {chosen}: on them, F1 is optimistic."]
        return "\n".join(lines + where(self.folder))


def measure_labels(
    logits: NDArray[np.floating],
    targets: NDArray[np.floating],
    classes: Sequence[str],
    thresholds: Sequence[float] | None = None,
) -> LabelMetrics:
    """Compares logits, (N, K), with labels of 0 and 1, (N, K); chooses thresholds by F1 if none are given."""
    _check(logits, targets, classes)
    logits = logits.astype(np.float64)
    chances = expit(logits)
    true = targets > 0.5
    ap, best = zip(*(_ap_and_threshold(chances[:, k], true[:, k]) for k in range(len(classes))), strict=True)
    chosen = best if thresholds is None else thresholds
    said = chances >= np.asarray(chosen)
    hits, given, support = (said & true).sum(axis=0), said.sum(axis=0), true.sum(axis=0)
    precision, recall = hits / np.maximum(given, 1), hits / np.maximum(support, 1)
    f1 = 2 * hits / np.maximum(given + support, 1)
    known = [value for value in ap if value is not None]
    return LabelMetrics(
        images=len(targets),
        map=float(np.mean(known)) if known else 0.0,
        macro_f1=float(f1[support > 0].mean()) if known else 0.0,
        micro_f1=float(2 * hits.sum() / max(given.sum() + support.sum(), 1)),
        loss=float((np.logaddexp(0, logits) - targets * logits).mean()),
        per_label=[
            LabelScore(
                name, ap[k], float(precision[k]), float(recall[k]), float(f1[k]), float(chosen[k]), int(support[k])
            )
            for k, name in enumerate(classes)
        ],
        probabilities=chances,
        targets=targets.astype(np.float32),
        chosen_here=thresholds is None,
    )


def _ap_and_threshold(chances: NDArray[np.float64], true: NDArray[np.bool_]) -> tuple[float | None, float]:
    """Average precision, and the threshold with the best F1: the middle between the last taken and the next image."""
    from sklearn.metrics import average_precision_score, precision_recall_curve  # slow to load, for this task only

    if not true.any():
        return None, 0.5
    precision, recall, thresholds = precision_recall_curve(true, chances)
    best = int(np.argmax(precision * recall / np.maximum(precision + recall, 1e-12)))
    next_one = thresholds[best - 1] if best else 0.0
    return float(average_precision_score(true, chances)), float(thresholds[best] + next_one) / 2


# Regression -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ValueScore:
    name: str
    mae: float
    rmse: float
    r2: float  # 0 where all true values are alike


@dataclass(frozen=True, eq=False)
class ValueMetrics:
    """How near numbers came, in the units of the data: means over the columns, and each by itself."""

    images: int
    mae: float
    rmse: float
    r2: float
    loss: float  # mean square of the errors in standard deviations of the training set
    per_value: list[ValueScore]
    predicted: NDArray[np.float64] = field(repr=False)  # N K
    targets: NDArray[np.float64] = field(repr=False)  # N K
    folder: Path | None = None

    @property
    def main(self) -> float:
        return self.r2  # has no unit, so that columns of different ones can be averaged

    def row(self) -> dict[str, float]:
        return {"loss": self.loss, "mae": self.mae, "rmse": self.rmse, "r2": self.r2}

    def summary(self) -> dict[str, float]:
        return {"images": self.images} | self.row()

    def to_json(self) -> dict[str, Any]:
        return self.summary() | {"per_value": [asdict(score) for score in self.per_value]}

    def csv(self) -> dict[str, list[list[object]]]:
        rows: list[list[object]] = [[s.name, f"{s.mae:.6g}", f"{s.rmse:.6g}", f"{s.r2:.6f}"] for s in self.per_value]
        return {"per_value": [["value", "mae", "rmse", "r2"], *rows]}

    def table(self) -> str:
        rows = [*self.per_value]
        if len(rows) > 1:
            rows.append(ValueScore("mean", self.mae, self.rmse, self.r2))
        width = max(len("value"), *(len(score.name) for score in rows))
        lines = [
            f"images  {self.images:,}",
            f"loss    {self.loss:.4f}",
            "",
            f"{'value':<{width}}  {'MAE':>10}  {'RMSE':>10}  {'R²':>7}",
            *(f"{s.name:<{width}}  {s.mae:>10.4g}  {s.rmse:>10.4g}  {s.r2:>7.4f}" for s in rows),
        ]
        return "\n".join(lines + where(self.folder))


def measure_values(
    outputs: NDArray[np.floating],
    targets: NDArray[np.floating],
    classes: Sequence[str],
    mean: Sequence[float],
    std: Sequence[float],
) -> ValueMetrics:
    """Compares outputs, (N, K) in standard deviations from the mean, with true values in their own units."""
    _check(outputs, targets, classes)
    scale = np.asarray(std, dtype=np.float64)
    true = targets.astype(np.float64)
    predicted = outputs.astype(np.float64) * scale + np.asarray(mean)
    errors = predicted - true
    mae, mse = np.abs(errors).mean(axis=0), (errors**2).mean(axis=0)
    spread = true.var(axis=0)
    r2 = np.where(spread > 0, 1 - mse / np.where(spread > 0, spread, 1), 0.0)
    return ValueMetrics(
        images=len(true),
        mae=float(mae.mean()),
        rmse=float(np.sqrt(mse).mean()),
        r2=float(r2.mean()),
        loss=float((mse / scale**2).mean()),
        per_value=[
            ValueScore(name, float(mae[k]), float(np.sqrt(mse[k])), float(r2[k])) for k, name in enumerate(classes)
        ],
        predicted=predicted,
        targets=true,
    )


# Any task -------------------------------------------------------------------------------------------------

# All have `images`, `loss` and `folder`; `main`, the higher the better, by which the best epoch is chosen; `row()` for
# metrics.csv; `summary()`, `to_json()`, `csv()` and `table()` for what is kept and shown.
AnyMetrics = Metrics | LabelMetrics | ValueMetrics


def measure_model(card: Card, outputs: NDArray[np.floating], targets: NDArray[Any]) -> AnyMetrics:
    """Compares a model's outputs with what is true, by its task."""
    if card.task == "multilabel":
        return measure_labels(outputs, targets, card.classes, card.thresholds or None)
    if card.task == "regression":
        return measure_values(outputs, targets, card.classes, card.target_mean, card.target_std)
    return measure(outputs, targets, card.classes)


def measured(card: Card, metrics: AnyMetrics, epoch: int) -> Card:
    """The card of a model that was just measured on validation images, with the thresholds that were best on them."""
    if isinstance(metrics, LabelMetrics):
        card = replace(card, thresholds=tuple(score.threshold for score in metrics.per_label))
    return card.measured(metrics.summary() | {"epoch": epoch})


def shown(name: str, value: float) -> str:
    """One of the numbers of a row as people read it: shares in percent, others as they are."""
    return f"{value:.2%}" if name in ("top1", "top5", "map", "macro_f1", "micro_f1") else f"{value:.4g}"


def _check(outputs: NDArray[np.floating], targets: NDArray[Any], classes: Sequence[str]) -> None:
    assert outputs.shape == (len(targets), len(classes)), (outputs.shape, len(targets), len(classes))
    if not len(targets):
        raise UserError("There is nothing to measure: the split holds no images.")
    if not np.isfinite(outputs).all():
        bad = int((~np.isfinite(outputs)).any(axis=1).sum())
        raise UserError(
            f"The model's outputs must be finite, but for {bad} of {len(targets)} images they are not: the "
            "weights diverged or are damaged. Take an earlier checkpoint."
        )


def where(folder: Path | None) -> list[str]:
    """The last lines of a table: where the files are, if there are any."""
    return [] if folder is None else ["", f"Figures and tables are in {folder}"]


def rounded(values: dict[str, Any]) -> dict[str, Any]:
    """Numbers as they are kept in JSON."""
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in values.items()}
