"""The task contract: what targets and outputs mean, how they are learnt, measured and presented.

A `Task` holds the class names and the constants that turn outputs into answers (temperature, thresholds, mean and
standard deviation). It belongs to the data it was read from and to the model trained on it, so nothing outside `tasks/`
distinguishes tasks by name.

Legend: N images, K classes, labels or values, M model outputs (`task.outputs`, usually K).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from vitrail.charts import build
from vitrail.charts.measure import Measure
from vitrail.config import TrainConfig
from vitrail.errors import UserError, nearest, shortlist
from vitrail.tasks.answer import Answer as Answer
from vitrail.tasks.answer import Confused as Confused
from vitrail.tasks.answer import Headline as Headline
from vitrail.tasks.answer import Health as Health
from vitrail.tasks.bootstrap import Samples
from vitrail.tasks.scores import Array, Floats, Meter, Numbers, Scores, Targets
from vitrail.tasks.words import Words

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

    from vitrail.charts.kinds import Chart
    from vitrail.models import Model, ModelConfig
    from vitrail.tasks.objective import Objective
    from vitrail.tasks.placement import Placement, Side

Columns = Mapping[str, Sequence[str]]  # the cells of each label column of a table, as text
Tone = Literal["plain", "wrong", "muted"]
Line = tuple[str, Tone, int]  # of a caption: text, tone, maximum number of rows


@dataclass(frozen=True)
class Task(Words, ABC):
    """Base class of tasks. A new task is a subclass in one file, registered with `tasks.register`."""

    classes: tuple[str, ...] = ()  # the names of the classes, labels or values

    name: ClassVar[str]  # in config.yaml, model.json and --task
    title: ClassVar[str]
    one: ClassVar[str]
    many: ClassVar[str]
    measures: ClassVar[tuple[Measure, ...]]  # overall, in the order to show; the first chooses the epoch to keep
    choices: ClassVar[Mapping[str, str]] = {}  # values of --best, and the measure that each one names
    columns: ClassVar[tuple[Measure, ...]]  # per class, label or value
    logged: ClassVar[tuple[Measure, ...]] = ()  # training values besides the loss, to show
    ranked: ClassVar[str]  # the column that ranks classes, labels or values
    counted: ClassVar[bool] = True  # whether scores of classes or labels have a `support`
    single: ClassVar[bool] = False  # one class per image: targets are class indices, (N,)
    optional: ClassVar[bool] = False  # an image may have no label: empty cells are valid
    annotated: ClassVar[bool] = False  # targets are annotations, (N,) objects, which move with the pixels: see `placed`
    slides: ClassVar[bool] = False  # outputs are logits on a grid over the input, which windows of a picture can share
    detail: ClassVar[int] = 1  # photographs are trained at this multiple of the recipe's size
    coarsest: ClassVar[int] = 16  # largest patch of a model that is chosen by the size of the images
    labelled: ClassVar[bool] = True  # False for self-supervision: labels are not read, targets are (N, 0) float32
    interchange: ClassVar[bool] = False  # whether other libraries' formats can express it
    answer: ClassVar[type[Answer]] = Answer  # what `answers` returns; without arguments, no answer
    objectives: ClassVar[tuple[str, ...]] = ("ce", "bce")  # values of --loss
    usage: ClassVar[str] = "vitrail predict RUN IMAGES"  # what a trained model is for, as a command
    meant: ClassVar[str] = "probabilities"  # what `meaning` returns; the output's name in an exported file

    def __str__(self) -> str:
        """For example "multi-label, 12 labels"."""
        return f"{self.title}, {len(self.classes)} {self.one if len(self.classes) == 1 else self.many}"

    @classmethod
    def text(cls, name: str, value: float, digits: int = 1) -> str:
        """A measured value as text."""
        measure = next((known for known in (*cls.measures, *cls.columns) if known.name == name), Measure(name, name))
        return measure.text(value, digits)

    def chosen(self, best: str | None) -> Measure:
        """The measure by which an epoch is kept; `best` as in --best."""
        return next(m for m in self.measures if best is None or m.name == self.choices[best])

    def telling(self, measure: str) -> bool:
        """Whether a measure is informative for these classes: top-5 of five classes is not."""
        return True

    @property
    def outputs(self) -> int:
        """The number of model outputs, M."""
        return len(self.classes)

    @property
    def output_names(self) -> tuple[str, ...]:
        """The name of each output, (M,): the targets of `explain`."""
        return self.classes

    def matches(self, other: Task) -> bool:
        """Whether both have the same kind of targets and the same classes in the same order."""
        return type(self) is type(other) and self.classes == other.classes

    # In files ---------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """The fields of a model card."""
        return {"task": self.name, **asdict(self)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Task:
        """The inverse of `to_json`; constants have one value per class. A task with a single number overrides it."""
        classes = document["classes"]
        if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
            raise UserError(f"'classes' must be a list of names, but it is {classes!r}.")
        constants = [f.name for f in fields(cls) if f.name != "classes" and not isinstance(f.default, float)]
        for name in constants:
            if len(document[name]) != len(classes) or not np.isfinite([*map(float, document[name])]).all():
                raise UserError(f"'{name}' must have one number for each of {len(classes)} {cls.many}, all finite.")
        return cls(tuple(classes), **{name: tuple(map(float, document[name])) for name in constants})

    # Targets ----------------------------------------------------------------------------------------------

    @classmethod
    def from_text(
        cls, columns: Columns, rows: Sequence[int], where: str, known: Sequence[str] | None = None
    ) -> tuple[Task, Targets]:
        """The task and the targets of a table's label columns; `known` are the classes of a trained model."""
        raise UserError(f"{where}: {cls.title} labels cannot be read from a table.")

    @classmethod
    def from_array(cls, labels: Sequence[Array], names: Sequence[str] | None, where: str) -> tuple[Task, list[Targets]]:
        """The task and the targets of label arrays, one array per split."""
        raise UserError(f"{where}: {cls.title} labels cannot be read from arrays.")

    @abstractmethod
    def check(self, parts: Mapping[str, Targets], source: object) -> None:
        """Raises UserError for targets, by split, that nothing can be learnt from or measured on."""

    @abstractmethod
    def strata(self, targets: Targets, fraction: float) -> Numbers:
        """The stratum of each image, when `fraction` of the images is held out."""

    def settle(self, targets: Targets, keep: Numbers, held: Numbers) -> tuple[Numbers, Numbers]:
        """Adjusts which images are kept and which held out."""
        return keep, held

    @abstractmethod
    def reorder(self, targets: Targets, classes: Sequence[str]) -> Targets:
        """Targets whose class names are all in `classes`, renumbered to the order of `classes`."""

    def adopt(self, model: Task, parts: Mapping[str, Targets], source: object) -> dict[str, Targets]:
        """The targets of each split in the class order of a trained model's task."""
        for name in self.classes:
            if name not in model.classes:
                raise UserError(
                    f"{source} has a {self.one} '{name}' that the model does not know.{nearest(name, model.classes)} "
                    f"The model's {len(model.classes)} {self.many} are {shortlist(model.classes, 10)}."
                )
        return {split: self.reorder(targets, model.classes) for split, targets in parts.items()}

    @abstractmethod
    def describe(self, targets: Targets) -> Iterator[tuple[str, tuple[str, ...]]]:
        """The label of each image as text, and the classes, labels or values it is an example of."""

    def audit(self, targets: Targets) -> Iterator[tuple[str, Literal["error", "note"], str, list[int]]]:
        """What `check` says of annotations: the kind of finding, its severity, a detail, and the images it is about."""
        yield from ()

    def counts(self, targets: Targets) -> Numbers | None:
        """The number of images of each class, (K,); None for a task without classes."""
        return None

    def statistics(self, targets: Targets) -> dict[str, Floats]:
        """A summary of training targets without classes: columns by name, (K,) each."""
        return {}

    def examples(self, targets: Targets, count: int, rng: np.random.Generator) -> dict[int, Numbers]:
        """Some images of each class or label, at most `count`, by class index."""
        has = targets[:, None] == np.arange(len(self.classes)) if targets.ndim == 1 else targets > 0.5
        return {k: rng.permutation(np.flatnonzero(has[:, k]))[:count] for k in range(len(self.classes))}

    @property
    def remedy(self) -> str:
        """The options that compensate for class imbalance."""
        return ""

    def plain(self) -> Task:
        """The task of a model whose outputs are logits or values, as they are."""
        return self

    def fitted(self, targets: Targets) -> Task:
        """The task with the constants estimated from training targets."""
        return self

    def measured(self, scores: Any) -> Task:
        """The task with the constants estimated from validation scores."""
        return self

    def calibrated(self, outputs: NDArray[np.floating], targets: Targets) -> tuple[Task, dict[str, float], str]:
        """The task with calibrated probabilities, what was measured for the model card, and a line on it."""
        return self, {}, ""

    # Training ---------------------------------------------------------------------------------------------

    def adapt(self, config: TrainConfig) -> TrainConfig:
        """A recipe's configuration without what does not suit the task."""
        return config

    def check_settings(self, config: TrainConfig, given: Mapping[str, Any], source: str) -> TrainConfig:
        """Raises UserError for settings that do not apply to the task; completes those of distillation."""
        loss, known = config.optim.loss, ", ".join(self.objectives)
        if loss not in self.objectives:
            raise UserError(f"--loss must be one of {known} for {self.title} data, but it is {loss}.")
        if config.source.balanced_sampling and not self.single:
            raise UserError("Balanced sampling needs one class per image. Remove --balanced-sampling.")
        for name, asked in (("smoothing", config.augment.smoothing), ("class_weights", config.source.class_weights)):
            if asked and not self.counted:
                flag = name.replace("_", "-")
                raise UserError(f"--{flag} needs classes or labels, but {source} has {self.many}. Remove --{flag}.")
        return config

    def check_model(self, model: Model, config: TrainConfig) -> None:  # most accept any model
        """Raises UserError for a model or settings that the task cannot train."""

    def output_order(self, teacher: Task) -> list[int]:
        """The index of a teacher's output for each output of this task; both have the same classes."""
        if self.outputs == len(self.classes) and set(teacher.classes) == set(self.classes):
            return [teacher.classes.index(name) for name in self.classes]
        if teacher.classes != self.classes and set(teacher.classes) == set(self.classes):
            raise UserError(
                f"The {self.many} of the teacher must be in the order of the data: {shortlist(self.classes, 5)}."
            )
        return list(range(self.outputs))

    def architecture(self, body: ModelConfig, options: Mapping[str, Any]) -> ModelConfig:
        """The model of the task, for the architecture that was asked for and the options to change in it."""
        from vitrail.models import backbone

        return replace(backbone(body), classes=self.outputs, **options)

    def placed(self, annotation: Any, placement: Placement) -> Array:
        """The annotation of an image in the model's input, of one shape for all images: the training target."""
        raise NotImplementedError

    def blank(self, images: int, size: tuple[int, int]) -> Array:
        """Training targets of images of this input size without any annotation, to measure speed and memory."""
        raise NotImplementedError

    @abstractmethod
    def objective(self, model: Model, config: TrainConfig, targets: Targets) -> Objective:
        """The training objective, for training images with these targets."""

    def translate(self, outputs: Tensor, teacher: Task) -> Tensor:
        """Outputs for a teacher's task, in the teacher's class order, on the scale of this task's outputs."""
        return outputs

    # Answers ----------------------------------------------------------------------------------------------

    @abstractmethod
    def meaning(self, outputs: Tensor) -> Tensor:
        """Outputs (B, M) as probabilities or values, (B, K); the only definition, also used in exported graphs."""

    def meaning_at(self, outputs: Tensor, size: Side, shown: Side, input: Side) -> Tensor:
        """`meaning` in pixels of images of this size, `shown` at the top left of the input, for annotated tasks."""
        raise NotImplementedError

    def means(self, outputs: NDArray[np.floating]) -> Floats:
        """`meaning` of an array, in double precision. A task whose `meaning` needs tensors overrides it."""
        return np.asarray(self.meaning(outputs.astype(np.float64)))  # type: ignore[arg-type]  # see `arrays`

    def steady(self, meant: Array) -> Array:
        """The part of what `meaning` returns that changes little if outputs do: what two backends must agree on."""
        return meant

    def strength(self, outputs: Tensor) -> Tensor:
        """The strength of each output, (B, M), which `explain` tracks while removing patches."""
        return self.meaning(outputs)

    @abstractmethod
    def answers(self, meant: NDArray[np.floating], top: int | None = None) -> list[Answer]:
        """The answers for images, from what `meaning` returned, (B, K); at most `top` labels each."""

    def answers_above(self, meant: NDArray[np.floating], threshold: float, top: int | None = None) -> Sequence[Answer]:
        """`answers` without labels of a lower probability, for a task whose outputs mean probabilities."""
        return [answer.above(threshold) for answer in self.answers(meant, top)]

    def located(self, outputs: NDArray[np.floating], placement: Placement, threshold: float | None = None) -> Answer:
        """The answer for one image of an annotated task, from its outputs, in the pixels of the original image."""
        raise NotImplementedError

    def layers(self, outputs: NDArray[np.floating], target: Any) -> tuple[Image.Image, Image.Image] | None:
        """The answer and the truth as transparent pictures to lay over the image; None for a task without a place."""
        return None

    @abstractmethod
    def meter(self) -> Meter: ...

    def measure(self, outputs: NDArray[np.floating], targets: Targets) -> Any:
        """The scores of outputs, (N, M)."""
        meter = self.meter()
        meter.add(outputs, targets)
        return meter.scores()

    @abstractmethod
    def restore(self, document: Mapping[str, Any]) -> Scores:
        """The inverse of `Scores.to_json`, without the values of individual images."""

    # Single predictions -----------------------------------------------------------------------------------

    @abstractmethod
    def losses(self, outputs: NDArray[np.floating], targets: Targets) -> Floats:
        """The loss of each prediction, (N,); it ranks the worst predictions everywhere."""

    @abstractmethod
    def right(self, outputs: NDArray[np.floating], targets: Targets) -> NDArray[np.bool_]:
        """Whether each prediction is right, (N,)."""

    def worst(self, outputs: NDArray[np.floating], targets: Targets, count: int) -> Numbers:
        """Images with a wrong prediction, highest loss first."""
        order = np.argsort(-self.losses(outputs, targets), kind="stable")
        return order[~self.right(outputs, targets)[order]][:count]

    def best(self, outputs: NDArray[np.floating], targets: Targets, count: int) -> Numbers:
        """Images with a right prediction, lowest loss first."""
        order = np.argsort(self.losses(outputs, targets), kind="stable")
        return order[self.right(outputs, targets)[order]][:count]

    @abstractmethod
    def margins(self, outputs: NDArray[np.floating]) -> Floats:
        """The confidence margin of each prediction, (N,)."""

    @abstractmethod
    def caption(self, meant: NDArray[np.floating], target: Any) -> list[Line]:
        """The caption of an image: true and predicted labels."""

    def said(self, meant: NDArray[np.floating], target: Any) -> tuple[str, str]:
        """The predicted and the true label of an image, in a few words."""
        answer = self.answers(meant[None], 1 if self.single else None)[0]
        pairs = zip(answer.labels, answer.probabilities, strict=True)
        ((_, names),) = self.describe(np.asarray(target)[None])
        return ", ".join(f"{label} ({share:.0%})" for label, share in pairs) or "(none)", ", ".join(names)

    def confused(self, outputs: NDArray[np.floating], targets: Targets, most: int, examples: int) -> list[Confused]:
        """The most frequent mistakes, in descending order."""
        return []

    def ranking(self, outputs: NDArray[np.floating]) -> Numbers:
        """The outputs of each image from most to least likely, (N, M)."""
        return np.argsort(-outputs, axis=1, kind="stable")

    @abstractmethod
    def same(self, given: Array, expected: Array, tolerance: float) -> NDArray[np.bool_]:
        """Whether two backends agree on each image's answer, by their outputs (N, M)."""

    @abstractmethod
    def differ(self, given: Array, expected: Array, tolerance: float) -> NDArray[np.bool_]:
        """Whether they disagree although the answer is clear by more than `tolerance`."""

    # Reports ----------------------------------------------------------------------------------------------

    @abstractmethod
    def charts(self, scores: Any) -> list[Chart]:
        """The charts of an evaluation."""

    @abstractmethod
    def sample(self, scores: Any, outputs: NDArray[np.floating] | None, targets: Targets | None) -> Samples:
        """Bootstrap samples of the scores; without outputs, of those that the scores suffice for."""

    def groups(self, targets: Targets) -> tuple[Sequence[str], Numbers, str] | None:
        """Groups to colour images by: names, the group of each image, and a title; None to colour by value."""
        return None

    @abstractmethod
    def goal(self, data: str) -> str:
        """What a model learns, as a verb phrase: "classify digits into 10 classes"."""

    @abstractmethod
    def headline(self, data: str, score: str, images: str) -> tuple[str, str]:
        """The text before and after the main score in a report's first sentence, following the model's name."""

    def curves(self, rows: build.Rows, config: TrainConfig, kept: int | None) -> Sequence[Chart]:
        """The charts of training, from the rows of metrics.csv; `kept` is the epoch of the model."""
        return build.curves(rows, self.measures[0], kept)

    def levels(self, config: TrainConfig) -> Mapping[str, tuple[str, float]]:
        """A value to compare each measure with, and what it means."""
        return {}

    def health(self, scores: Any, means: Mapping[str, float], config: TrainConfig) -> Health:
        """Whether features differ between images, from an epoch's scores and training values."""
        return Health(True, "")

    worst_title: ClassVar[str] = "Wrong predictions, highest loss first."
    best_title: ClassVar[str] = "Right predictions, lowest loss first."
    certain: ClassVar[str] = "smallest margin first"  # the order of the least certain predictions
