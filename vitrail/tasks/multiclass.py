"""Multi-class: every image has exactly one class. Cross-entropy; top-1, top-5, calibration, confusion."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from vitrail.charts import build
from vitrail.charts.measure import Measure, lean
from vitrail.config import TrainConfig
from vitrail.errors import UserError
from vitrail.tasks.arrays import logsumexp, softmax
from vitrail.tasks.bootstrap import Samples, collect, draws, sums
from vitrail.tasks.calibration import (
    BINS,
    Bin,
    bin_numbers,
    calibration_error,
    calibration_gap,
    crossed_error,
    fit_temperature,
    reliability_bins,
    top_probability,
)
from vitrail.tasks.class_scores import ClassScore, MulticlassScores
from vitrail.tasks.scores import Array, Columnar, Floats, Meter, Numbers, Targets, mean_error
from vitrail.tasks.task import Answer, Confused, Line, Task

if TYPE_CHECKING:
    from torch import Tensor

    from vitrail.charts.kinds import Chart
    from vitrail.models import Model
    from vitrail.tasks.objective import Objective

TOP = 5  # classes per answer by default


@dataclass(frozen=True)
class Multiclass(Task):
    """One class per image."""

    temperature: float = 1.0  # divides the logits; fitted to validation images, so that probabilities are calibrated

    name: ClassVar[str] = "multiclass"
    title: ClassVar[str] = "multi-class"
    one: ClassVar[str] = "class"
    many: ClassVar[str] = "classes"
    measures: ClassVar[tuple[Measure, ...]] = (
        Measure(
            "top1", "top-1", "images whose likeliest class is the true one", percent=True, heading="Top-1 accuracy"
        ),
        Measure("top5", "top-5", "images whose true class is among the five likeliest", percent=True),
        Measure("macro_f1", "macro F1", "mean of the classes' F1", percent=True, detail=True),
        Measure("balanced_accuracy", "balanced accuracy", "mean of the classes' recall", percent=True, detail=True),
        Measure(
            "ece", "calibration error", "mean gap between confidence and accuracy", percent=True, lower_is_better=True
        ),
        Measure("loss", "loss", "mean cross-entropy of the calibrated probabilities", lower_is_better=True),
    )
    columns: ClassVar[tuple[Measure, ...]] = (
        Measure("precision", "precision", percent=True),
        Measure("recall", "recall", percent=True),
        Measure("f1", "F1", percent=True),
    )
    choices: ClassVar[Mapping[str, str]] = {
        "top1": "top1",
        "f1": "macro_f1",
        "balanced": "balanced_accuracy",
        "loss": "loss",
    }
    ranked: ClassVar[str] = "f1"
    single: ClassVar[bool] = True
    interchange: ClassVar[bool] = True
    best_title: ClassVar[str] = "Right predictions of every class in turn, lowest loss first."
    certain: ClassVar[str] = "smallest lead of the first class over the second"

    def telling(self, measure: str) -> bool:
        return measure != "top5" or len(self.classes) > 5

    # Targets ----------------------------------------------------------------------------------------------

    def check(self, parts: Mapping[str, Targets], source: object) -> None:
        trained = np.unique(parts["train"])
        if len(trained) < 2:
            raise UserError(f"{source} has only one class, '{self.classes[trained[0]]}'. A classifier needs two.")
        for split, targets in parts.items():
            unseen = np.setdiff1d(targets, trained)
            if len(unseen):
                raise UserError(
                    f"The class '{self.classes[unseen[0]]}' is in the {split} split of {source}, but not in train. "
                    "Add images of it to train, or remove the class."
                )

    def strata(self, targets: Targets, fraction: float) -> Numbers:
        return targets

    def reorder(self, targets: Targets, classes: Sequence[str]) -> Targets:
        return np.array([classes.index(name) for name in self.classes], dtype=np.int64)[targets]

    def describe(self, targets: Targets) -> Iterator[tuple[str, tuple[str, ...]]]:
        for target in targets:
            yield self.classes[target], (self.classes[target],)

    def counts(self, targets: Targets) -> Numbers:
        return np.bincount(targets, minlength=len(self.classes))

    @property
    def remedy(self) -> str:
        return "--balanced-sampling or --class-weights"

    # In files ---------------------------------------------------------------------------------------------

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Task:
        task, temperature = super().from_json(document), document.get("temperature", 1.0)  # absent in older files
        assert isinstance(task, Multiclass)
        if not isinstance(temperature, int | float) or not 0 < temperature < np.inf:
            raise UserError(f"'temperature' must be a positive number, but it is {temperature!r}.")
        return replace(task, temperature=float(temperature))

    # Training ---------------------------------------------------------------------------------------------

    def calibrated(self, outputs: NDArray[np.floating], targets: Targets) -> tuple[Task, dict[str, float], str]:
        """With the temperature of the lowest cross-entropy, if it helps on images that it was not fitted to.

        A subclass with other outputs is not calibrated.
        """
        if outputs.shape[1] != len(self.classes):
            return self, {}, ""
        task, right = replace(self, temperature=fit_temperature(outputs, targets)), self.right(outputs, targets)
        before = reliability_bins(top_probability(outputs.astype(np.float64)), right)
        crossed = crossed_error(outputs, targets, right)
        if crossed > calibration_error(before):
            worse = f"from {calibration_error(before):.1%} to {crossed:.1%} (cross-fitted)"
            line = f"No temperature: fitted to {len(targets):,} validation images, it would raise the calibration error"
            return replace(self, temperature=1.0), {}, f"{line} {worse}."
        line = (
            f"Temperature {task.temperature:.2f}, fitted to {len(targets):,} validation images: calibration error "
            f"{crossed:.1%} (cross-fitted) instead of {calibration_error(before):.1%}; without it the model is "
            f"{lean(calibration_gap(before))}."
        )
        return task, {"crossfitted_ece": crossed}, line

    def objective(self, model: Model, config: TrainConfig, targets: Targets) -> Objective:
        from vitrail.tasks.objective import CrossEntropy, Loss, class_tensor

        weights = class_weights(self.counts(targets)) if config.source.class_weights else None
        smoothing, ema = config.augment.smoothing, config.optim.model_ema
        loss: Loss = "bce" if config.optim.loss == "bce" else "ce"
        return CrossEntropy(model, loss, class_tensor(weights, model), smoothing, ema)

    # Answers ----------------------------------------------------------------------------------------------

    def meaning(self, outputs: Tensor) -> Tensor:
        return softmax(outputs / self.temperature)

    def answers(self, meant: NDArray[np.floating], top: int | None = None) -> list[Answer]:
        found = []
        for chances in meant.tolist():
            best = sorted(range(len(chances)), key=lambda k: -chances[k])[: top or TOP]
            found.append(Answer(tuple(self.classes[k] for k in best), tuple(chances[k] for k in best)))
        return found

    def meter(self) -> Meter:
        def split(outputs: Floats, labels: Numbers) -> tuple[Array, ...]:
            logits, plain = self.logits(outputs), replace(self, temperature=1.0).logits(outputs)
            return labels, self.choice(outputs), *each_image(logits, labels), top_probability(plain)

        return Columnar(split, self._scores)

    def _scores(
        self, labels: Numbers, said: Numbers, rank: Numbers, losses: Floats, confidence: Floats, unscaled: Floats
    ) -> MulticlassScores:
        right = rank == 0
        bins, unscaled_bins = (reliability_bins(values, right) for values in (confidence, unscaled))
        # scikit-learn would warn of "a regression problem" when there are many classes and few images.
        confusion = np.zeros((len(self.classes), len(self.classes)), np.int64)
        np.add.at(confusion, (labels, said), 1)
        hits, support, chosen = confusion.diagonal(), confusion.sum(axis=1), confusion.sum(axis=0)
        precision, recall = hits / np.maximum(chosen, 1), hits / np.maximum(support, 1)
        f1 = 2 * hits / np.maximum(chosen + support, 1)
        return MulticlassScores(
            images=len(labels),
            top1=float(right.mean()),
            top5=float((rank < 5).mean()),
            loss=float(losses.mean()),
            loss_error=mean_error(losses),
            ece=calibration_error(bins),
            per_class=[
                ClassScore(name, float(precision[i]), float(recall[i]), float(f1[i]), int(support[i]))
                for i, name in enumerate(self.classes)
            ],
            confusion=confusion,
            bins=bins,
            gap=calibration_gap(bins),
            temperature=self.temperature,
            unscaled_ece=calibration_error(unscaled_bins),
            unscaled_gap=calibration_gap(unscaled_bins),
        )

    def restore(self, document: Mapping[str, Any]) -> MulticlassScores:
        bins = [Bin(**bin) for bin in document["bins"]]
        gap = calibration_gap(bins)
        older = {"gap": gap, "temperature": 1.0, "unscaled_ece": document["ece"], "unscaled_gap": gap}
        return MulticlassScores(
            **{name: document[name] for name in ("images", "top1", "top5", "loss", "ece")},
            per_class=[ClassScore(**score) for score in document["per_class"]],
            confusion=np.array(document["confusion"], np.int64),
            bins=bins,
            **{name: document.get(name, value) for name, value in older.items()},  # absent in older files
        )

    # Single predictions -----------------------------------------------------------------------------------

    def losses(self, outputs: NDArray[np.floating], targets: Targets) -> Floats:
        """Cross-entropy."""
        return each_image(self.logits(outputs), targets)[1]

    def right(self, outputs: NDArray[np.floating], targets: Targets) -> NDArray[np.bool_]:
        return np.asarray(self.choice(outputs) == targets)

    def logits(self, outputs: NDArray[np.floating]) -> Floats:
        """The scaled logit of every class, (N, K), or log-probabilities in a subclass with other outputs."""
        if outputs.shape[1] == len(self.classes):
            return outputs.astype(np.float64) / self.temperature
        return np.log(np.maximum(self.means(outputs), 1e-300))

    def choice(self, outputs: NDArray[np.floating]) -> Numbers:
        """The predicted class of every image, (N,)."""
        return self.logits(outputs).argmax(axis=1)

    def best(self, outputs: NDArray[np.floating], targets: Targets, count: int) -> Numbers:
        """Alternating between classes."""
        found = super().best(outputs, targets, len(targets))
        return in_turn(found, targets[found])[:count]

    def margins(self, outputs: NDArray[np.floating]) -> Floats:
        """The lead of the first class over the second."""
        chances = self.means(outputs)
        if chances.shape[1] == 1:
            return np.ones(len(chances))
        second, first = np.partition(chances, -2, axis=1)[:, -2:].T
        return first - second

    def caption(self, meant: NDArray[np.floating], target: Any) -> list[Line]:
        def name(k: int) -> str:
            return f"{self.classes[k]} {meant[k]:.1%}"

        first, *others = np.argsort(-meant, kind="stable").tolist()
        if first != target:
            return [(f"true: {name(target)}", "plain", 2), (f"predicted: {name(first)}", "wrong", 2)]
        return [(f"right: {name(target)}", "plain", 2), *((f"next: {name(k)}", "muted", 2) for k in others[:1])]

    def confused(self, outputs: NDArray[np.floating], targets: Targets, most: int, examples: int) -> list[Confused]:
        """The largest off-diagonal cells of the confusion matrix."""
        said, worst = self.choice(outputs), self.worst(outputs, targets, len(targets))
        cells = np.bincount(targets * len(self.classes) + said, minlength=len(self.classes) ** 2)
        cells[:: len(self.classes) + 1] = 0
        found = []
        for cell in np.argsort(-cells, kind="stable")[:most].tolist():
            true, other = divmod(cell, len(self.classes))
            if cells[cell]:
                numbers = [i for i in worst.tolist() if targets[i] == true and said[i] == other][:examples]
                of = int((targets == true).sum())
                found.append(Confused(self.classes[true], self.classes[other], int(cells[cell]), of, tuple(numbers)))
        return found

    def same(self, given: Array, expected: Array, tolerance: float) -> NDArray[np.bool_]:
        return np.asarray(self.choice(given) == self.choice(expected))

    def differ(self, given: Array, expected: Array, tolerance: float) -> NDArray[np.bool_]:
        clear = self.logits(expected)
        slack = tolerance * np.abs(clear).max()
        chosen = np.take_along_axis(clear, self.choice(given)[:, None], axis=1)
        return np.asarray(chosen < clear.max(axis=1, keepdims=True) - slack)[:, 0]

    # Reports ----------------------------------------------------------------------------------------------

    def charts(self, scores: MulticlassScores) -> list[Chart]:
        names = [score.name for score in scores.per_class]
        bins = [(b.confidence, b.accuracy, b.count) for b in scores.bins]
        reliability = build.reliability(bins)
        if scores.temperature != 1:
            before = f"calibration error {scores.unscaled_ece:.1%}, {lean(scores.unscaled_gap)}"
            scaled = f"Logits are divided by a temperature of {scores.temperature:.2f}; before: {before}."
            reliability = replace(reliability, help=f"{reliability.help} {scaled}")
        return [build.confusion(scores.confusion, names), reliability]

    def sample(
        self, scores: MulticlassScores, outputs: NDArray[np.floating] | None, targets: Targets | None
    ) -> Samples:
        if outputs is None or targets is None:  # the confusion matrix suffices for top-1 and the class scores
            axes = np.indices(scores.confusion.shape)
            labels, said = (np.repeat(axis.ravel(), scores.confusion.ravel()) for axis in axes)
            return self._sample(labels, said, {"top1": (labels == said).astype(np.float64)}, None)
        rank, losses, confidence = each_image(self.logits(outputs), targets)
        right = (rank == 0).astype(np.float64)
        means = {"top1": right, "top5": (rank < 5).astype(np.float64), "loss": losses}
        return self._sample(targets, self.choice(outputs), means, (confidence, right))

    def _sample(
        self, labels: Numbers, said: Numbers, means: Mapping[str, Floats], sure: tuple[Floats, Floats] | None
    ) -> Samples:
        parts, classes = [], len(self.classes)
        for weights in draws(len(labels)):
            whole = {name: weights @ values / len(labels) for name, values in means.items()}
            if sure is not None:
                confidence, right = sure
                gaps = np.abs(sums(weights, bin_numbers(confidence), BINS, right - confidence))
                whole["ece"] = gaps.sum(axis=1) / len(labels)
            hits = sums(weights, labels, classes, (labels == said).astype(np.float64))
            support, chosen = sums(weights, labels, classes), sums(weights, said, classes)
            each = {
                "precision": hits / np.maximum(chosen, 1),
                "recall": hits / np.maximum(support, 1),
                "f1": 2 * hits / np.maximum(chosen + support, 1),
            }
            there = support > 0
            for name, column in (("macro_f1", "f1"), ("balanced_accuracy", "recall")):
                whole[name] = (each[column] * there).sum(axis=1) / there.sum(axis=1)
            parts.append((whole, each))
        return collect(parts)

    def groups(self, targets: Targets) -> tuple[Sequence[str], Numbers, str]:
        return self.classes, targets, self.one

    def goal(self, data: str) -> str:
        return f"classify {data} into {len(self.classes):,} classes"

    def headline(self, data: str, score: str, images: str) -> tuple[str, str]:
        return f"classifies {data} into {len(self.classes):,} classes: ", f" of {images} are right."


def each_image(logits: Floats, labels: Numbers) -> tuple[Numbers, Floats, Floats]:
    """The rank of the true class, from 0, its cross-entropy, and the largest probability, of each image."""
    own = logits[np.arange(len(labels)), labels]
    # Ties go to the first class, as in argmax, so that top-1 agrees with the confusion matrix.
    earlier = np.arange(logits.shape[1]) < labels[:, None]
    rank = ((logits > own[:, None]) | ((logits == own[:, None]) & earlier)).sum(axis=1)
    return rank, logsumexp(logits) - own, top_probability(logits)


def class_weights(counts: Numbers) -> NDArray[np.float32]:
    """Class weights of the loss, (K,), by inverse frequency: their mean over the images is 1.

    This gives the loss the same expectation as balanced sampling; its square root, or Cui's effective number of
    images, only goes part of the way and needs a parameter.
    """
    there = np.maximum(counts, 1)
    return (counts.sum() / (np.count_nonzero(counts) * there)).astype(np.float32)


def in_turn(numbers: Numbers, groups: Numbers) -> Numbers:
    """The first of each group, then the second of each, and so on."""
    order = np.argsort(groups, kind="stable")
    starts = np.searchsorted(groups[order], groups[order])
    turn = np.empty(len(numbers), np.int64)
    turn[order] = np.arange(len(numbers)) - starts
    return numbers[np.argsort(turn, kind="stable")]
