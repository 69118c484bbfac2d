"""Multi-label: each image has any number of labels. Binary cross-entropy; average precision and F1."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from vitrail.charts import build
from vitrail.charts.measure import Measure
from vitrail.config import TrainConfig
from vitrail.errors import UserError, shortlist
from vitrail.tasks.answer import LabelsAnswer
from vitrail.tasks.arrays import sigmoid
from vitrail.tasks.average_precision import ap_and_threshold, map_standard_error, sample_labels
from vitrail.tasks.bootstrap import Samples
from vitrail.tasks.calibration import reliability_bins
from vitrail.tasks.columns import alike, column_names, float_columns, read_columns
from vitrail.tasks.distillation import soft_distillation
from vitrail.tasks.infer import binary, split_labels
from vitrail.tasks.scores import (
    LOSS,
    Array,
    Columnar,
    Floats,
    Meter,
    Numbers,
    Scores,
    Targets,
    files_line,
    mean_error,
    rounded,
)
from vitrail.tasks.task import Answer, Columns, Confused, Line, Task

if TYPE_CHECKING:
    from torch import Tensor

    from vitrail.charts.kinds import Chart
    from vitrail.models import Model
    from vitrail.tasks.objective import Objective


@dataclass(frozen=True)
class LabelScore:
    """The scores of one label. Average precision is None if no image has the label."""

    name: str
    ap: float | None
    precision: float
    recall: float
    f1: float
    threshold: float  # predicted from this probability on
    support: int


@dataclass(frozen=True, eq=False, kw_only=True)
class MultilabelScores(Scores):
    """Multi-label scores. Means over labels skip those that no image has."""

    map: float  # mean average precision
    macro_f1: float
    micro_f1: float
    per_label: list[LabelScore]
    probabilities: Floats = field(repr=False)  # N K
    targets: NDArray[np.float32] = field(repr=False)  # N K
    chosen_here: bool  # whether the thresholds were chosen on these images

    @property
    def main(self) -> float:
        return self.map

    @property
    def standard_error(self) -> float:
        return map_standard_error(self.probabilities, self.targets > 0.5)

    @property
    def each(self) -> list[LabelScore]:
        return self.per_label

    @property
    def unseen(self) -> list[str]:
        """The labels that no image has."""
        return [score.name for score in self.per_label if not score.support]

    def row(self) -> dict[str, float]:
        return {"loss": self.loss, "map": self.map, "macro_f1": self.macro_f1, "micro_f1": self.micro_f1}

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
        chosen = "these images" if self.chosen_here else "the run's validation images"
        lines += ["", f"Thresholds maximise F1 on {chosen}, so F1 is optimistic there."]
        return "\n".join(lines + files_line(self.folder))


@dataclass(frozen=True)
class Multilabel(Task):
    """Any number of labels per image."""

    thresholds: tuple[float, ...] = ()  # predicted from this probability on; chosen on validation images

    name: ClassVar[str] = "multilabel"
    title: ClassVar[str] = "multi-label"
    one: ClassVar[str] = "label"
    many: ClassVar[str] = "labels"
    measures: ClassVar[tuple[Measure, ...]] = (
        Measure(
            "map", "mAP", "average precision, mean over the labels", percent=True, heading="Mean average precision"
        ),
        Measure("macro_f1", "macro F1", "mean of the labels' F1, each at its threshold", percent=True),
        Measure("micro_f1", "micro F1", "F1 over all labels and images together", percent=True),
        LOSS,
    )
    columns: ClassVar[tuple[Measure, ...]] = (
        Measure("ap", "average precision", percent=True),
        Measure("precision", "precision", percent=True),
        Measure("recall", "recall", percent=True),
        Measure("f1", "F1", percent=True),
        Measure("threshold", "threshold"),
    )
    choices: ClassVar[Mapping[str, str]] = {"map": "map", "f1": "macro_f1", "loss": "loss"}
    ranked: ClassVar[str] = "ap"
    answer: ClassVar[type[Answer]] = LabelsAnswer
    optional: ClassVar[bool] = True
    certain: ClassVar[str] = "nearest to a threshold"

    # Targets ----------------------------------------------------------------------------------------------

    @classmethod
    def from_text(
        cls, columns: Columns, rows: Sequence[int], where: str, known: Sequence[str] | None = None
    ) -> tuple[Task, Targets]:
        """Several names in a cell, or a column of 0 and 1 for each label."""
        cells = next(iter(columns.values()))
        if len(columns) == 1 and any(binary(cell) is None for cell in cells):
            lists = split_labels(cells, known)
            classes = tuple(sorted({label for labels in lists for label in labels}))
            numbers = {label: number for number, label in enumerate(classes)}
            targets = np.zeros((len(cells), len(classes)), dtype=np.float32)
            for row, labels in zip(targets, lists, strict=True):
                row[[numbers[label] for label in labels]] = 1
            return cls(classes), targets
        return cls(tuple(columns)), read_columns(columns, rows, where, binary, "0 or 1")

    @classmethod
    def from_array(cls, labels: Sequence[Array], names: Sequence[str] | None, where: str) -> tuple[Task, list[Targets]]:
        rule = "0 or 1 for each of K labels"
        targets = float_columns(labels, where, rule, lambda y: np.isin(y, (0, 1)))
        return cls(column_names(targets, names, where, cls)), targets

    def check(self, parts: Mapping[str, Targets], source: object) -> None:
        if not self.classes:
            raise UserError(f"No image of {source} has a label. Add labels.")
        targets = parts["train"]
        same = np.ptp(targets, axis=0) == 0
        never = same & (targets[0] == 0)
        if never.any():
            raise UserError(
                f"No training image of {source} has the label '{self.classes[int(never.argmax())]}'. "
                "Add some that have it, or leave it out."
            )
        if same.all():
            raise alike(self.classes[int(same.argmax())], source)

    def strata(self, targets: Targets, fraction: float) -> Numbers:
        """The rarest label of an image."""
        rarity = np.where(targets > 0, targets.sum(axis=0), np.inf)
        return np.where(targets.any(axis=1), rarity.argmin(axis=1), targets.shape[1])

    def settle(self, targets: Targets, keep: Numbers, held: Numbers) -> tuple[Numbers, Numbers]:
        """Keeps one image of a label that would be held out entirely."""
        lost = np.flatnonzero(targets[held].any(axis=0) & ~targets[keep].any(axis=0))
        back = np.array([held[targets[held, label] > 0][0] for label in lost], dtype=np.int64)
        return np.union1d(keep, back), np.setdiff1d(held, back)

    def reorder(self, targets: Targets, classes: Sequence[str]) -> Targets:
        moved = np.zeros((len(targets), len(classes)), dtype=np.float32)
        moved[:, [classes.index(name) for name in self.classes]] = targets
        return moved

    def describe(self, targets: Targets) -> Iterator[tuple[str, tuple[str, ...]]]:
        for target in targets:
            labels = tuple(self.classes[k] for k in np.flatnonzero(target))
            yield "|".join(labels) or "(none)", labels or ("(none)",)

    def counts(self, targets: Targets) -> Numbers:
        return targets.astype(np.int64).sum(axis=0)

    @property
    def remedy(self) -> str:
        return "--class-weights"

    def measured(self, scores: MultilabelScores) -> Task:
        """With the thresholds that maximise F1 on the validation images."""
        return replace(self, thresholds=tuple(score.threshold for score in scores.per_label))

    # Training ---------------------------------------------------------------------------------------------

    def check_settings(self, config: TrainConfig, given: Mapping[str, Any], source: str) -> TrainConfig:
        return soft_distillation(super().check_settings(config, given, source), given)

    def objective(self, model: Model, config: TrainConfig, targets: Targets) -> Objective:
        from vitrail.tasks.objective import BinaryCrossEntropy, class_tensor

        weights = None
        if config.source.class_weights:  # `pos_weight` balances images with and without a label
            counts = np.maximum(self.counts(targets), 1)
            weights = (np.maximum(len(targets) - counts, 1) / counts).astype(np.float32)
        return BinaryCrossEntropy(model, class_tensor(weights, model), config.optim.model_ema)

    # Answers ----------------------------------------------------------------------------------------------

    def meaning(self, outputs: Tensor) -> Tensor:
        return sigmoid(outputs)

    def answers(self, meant: NDArray[np.floating], top: int | None = None) -> list[Answer]:
        found: list[Answer] = []
        for chances in meant.tolist():
            given = [k for k, threshold in enumerate(self.thresholds) if chances[k] >= threshold]
            best = sorted(given, key=lambda k: -chances[k])[:top]
            found.append(LabelsAnswer(tuple(self.classes[k] for k in best), tuple(chances[k] for k in best)))
        return found

    def answers_above(self, meant: NDArray[np.floating], threshold: float, top: int | None = None) -> list[Answer]:
        return replace(self, thresholds=(threshold,) * len(self.classes)).answers(meant, top)

    def meter(self) -> Meter:
        def split(outputs: Floats, targets: Targets) -> tuple[Array, ...]:
            return self.means(outputs), targets, self.losses(outputs, targets)

        return Columnar(split, self._scores)

    def _scores(self, chances: Floats, targets: Targets, losses: Floats) -> MultilabelScores:
        true = targets > 0.5
        ap, best = zip(*(ap_and_threshold(chances[:, k], true[:, k]) for k in range(len(self.classes))), strict=True)
        chosen = self.thresholds or best
        said = chances >= np.asarray(chosen)
        hits, given, support = (said & true).sum(axis=0), said.sum(axis=0), true.sum(axis=0)
        precision, recall = hits / np.maximum(given, 1), hits / np.maximum(support, 1)
        f1 = 2 * hits / np.maximum(given + support, 1)
        known = [value for value in ap if value is not None]
        return MultilabelScores(
            images=len(targets),
            map=float(np.mean(known)) if known else 0.0,
            macro_f1=float(f1[support > 0].mean()) if known else 0.0,
            micro_f1=float(2 * hits.sum() / max(given.sum() + support.sum(), 1)),
            loss=float(losses.mean()),
            loss_error=mean_error(losses),
            per_label=[
                LabelScore(
                    name, ap[k], float(precision[k]), float(recall[k]), float(f1[k]), float(chosen[k]), int(support[k])
                )
                for k, name in enumerate(self.classes)
            ],
            probabilities=chances,
            targets=targets.astype(np.float32),
            chosen_here=not self.thresholds,
        )

    def restore(self, document: Mapping[str, Any]) -> MultilabelScores:
        none = np.zeros((0, len(self.classes)))
        return MultilabelScores(
            **{name: document[name] for name in ("images", "map", "macro_f1", "micro_f1", "loss")},
            per_label=[LabelScore(**score) for score in document["per_label"]],
            probabilities=none,
            targets=none.astype(np.float32),
            chosen_here=document["thresholds_chosen_on_these_images"],
        )

    # Single predictions -----------------------------------------------------------------------------------

    def losses(self, outputs: NDArray[np.floating], targets: Targets) -> Floats:
        """Binary cross-entropy, mean over the labels."""
        logits = outputs.astype(np.float64)
        return (np.logaddexp(0, logits) - targets * logits).mean(axis=1)

    def right(self, outputs: NDArray[np.floating], targets: Targets) -> NDArray[np.bool_]:
        return (self._given(self.means(outputs)) == (targets > 0.5)).all(axis=1)

    def _given(self, chances: NDArray[np.floating]) -> NDArray[np.bool_]:
        return np.asarray(chances >= np.asarray(self.thresholds))

    def margins(self, outputs: NDArray[np.floating]) -> Floats:
        """The distance of the least certain label from its threshold."""
        return np.abs(self.means(outputs) - np.asarray(self.thresholds)).min(axis=1)

    def caption(self, meant: NDArray[np.floating], target: Any) -> list[Line]:
        true, given = target > 0.5, self._given(meant)

        def names(which: NDArray[np.bool_]) -> str:
            order = sorted(np.flatnonzero(which), key=lambda k: -abs(meant[k] - true[k]))
            return ", ".join(f"{self.classes[k]} {meant[k]:.0%}" for k in order)

        lines: list[Line] = [(f"right: {names(true & given)}", "plain", 2)] if (true & given).any() else []
        lines += [(f"missed: {names(true & ~given)}", "wrong", 2)] if (true & ~given).any() else []
        lines += [(f"wrong: {names(given & ~true)}", "wrong", 2)] if (given & ~true).any() else []
        return lines or [("right: (no label)", "plain", 1)]

    def confused(self, outputs: NDArray[np.floating], targets: Targets, most: int, examples: int) -> list[Confused]:
        """The labels that are missed, or wrongly predicted, most often."""
        true, given = targets > 0.5, self._given(self.means(outputs))
        worst = self.worst(outputs, targets, len(targets)).tolist()
        found = []
        for k, name in enumerate(self.classes):
            for mistakes, title, what, of in (
                (true[:, k] & ~given[:, k], name, "missed", int(true[:, k].sum())),
                (~true[:, k] & given[:, k], f"not {name}", "predicted", int((~true[:, k]).sum())),
            ):
                numbers = tuple(i for i in worst if mistakes[i])
                if numbers:
                    found.append(Confused(title, what, len(numbers), of, numbers[:examples]))
        return sorted(found, key=lambda mistake: -mistake.count)[:most]

    def same(self, given: Array, expected: Array, tolerance: float) -> NDArray[np.bool_]:
        return (self._given(self.means(given)) == self._given(self.means(expected))).all(axis=1)

    def differ(self, given: Array, expected: Array, tolerance: float) -> NDArray[np.bool_]:
        chances = np.asarray(self.thresholds, np.float64)
        with np.errstate(divide="ignore"):
            edges = np.log(chances) - np.log1p(-chances)
        other = (given >= edges) != (expected >= edges)
        return (other & (np.abs(expected - edges) > tolerance * np.abs(expected).max())).any(axis=1)

    # Reports ----------------------------------------------------------------------------------------------

    def charts(self, scores: MultilabelScores) -> list[Chart]:
        if len(scores.unseen) == len(scores.per_label):  # no image has a label
            return []
        labels = scores.per_label
        names, ap, support = [s.name for s in labels], [s.ap for s in labels], [s.support for s in labels]
        found: list[Chart] = [build.average_precision(names, ap, support, scores.images)]
        if not len(scores.targets):  # restored from JSON
            return found
        chances, true = scores.probabilities.ravel(), scores.targets.ravel() > 0.5
        bins = [(b.confidence, b.accuracy, b.count) for b in reliability_bins(chances, true)]
        return [
            *found,
            build.precision_recall(scores.targets, scores.probabilities, names, [s.threshold for s in labels]),
            build.reliability(bins, "probability of a label", "share that has it", "predictions"),
        ]

    def sample(
        self, scores: MultilabelScores, outputs: NDArray[np.floating] | None, targets: Targets | None
    ) -> Samples:
        if outputs is None or targets is None:
            return Samples()
        thresholds = np.array([score.threshold for score in scores.per_label])
        return sample_labels(scores.probabilities, scores.targets > 0.5, thresholds, self.losses(outputs, targets))

    def groups(self, targets: Targets) -> tuple[Sequence[str], Numbers, str]:
        has = targets > 0.5
        first = np.where(has.any(axis=1), has.argmax(axis=1), len(self.classes))
        return [*self.classes, "(no label)"], first, "the first of an image's labels"

    def goal(self, data: str) -> str:
        return f"label {data} with {len(self.classes):,} labels"

    def headline(self, data: str, score: str, images: str) -> tuple[str, str]:
        return f"labels {data} with {len(self.classes):,} labels: a mean average precision of ", f" on {images}."
