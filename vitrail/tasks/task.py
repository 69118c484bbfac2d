"""What a task is: what targets and outputs mean, how they are learnt, measured, worded and drawn.

A `Task` object holds the class names and the constants that turn a model's outputs into answers (thresholds, mean and
standard deviation). It travels with the data that it was read from and with the model that learnt it, so nothing
outside `tasks/` asks which task it is.

Legend: N images, K classes, labels or values, M model outputs (`task.outputs`, mostly K).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from vitrail.charts.measure import Measure
from vitrail.config import TrainConfig
from vitrail.errors import UserError, nearest, shortlist
from vitrail.tasks.bootstrap import Samples
from vitrail.tasks.scores import Array, Floats, Meter, Numbers, Scores, Targets

if TYPE_CHECKING:
    from torch import Tensor

    from vitrail.charts.kinds import Chart
    from vitrail.models import Model
    from vitrail.tasks.objective import Objective

Columns = Mapping[str, Sequence[str]]  # the cells of every label column of a table, as text
Tone = Literal["plain", "wrong", "muted"]
Line = tuple[str, Tone, int]  # of a caption: its text, its tone, and how many rows it may take


@dataclass(frozen=True)
class Answer:
    """What a model says about one image: ranked labels with their probabilities."""

    labels: tuple[str, ...] = ()
    probabilities: tuple[float, ...] = ()
    values: tuple[float, ...] = ()  # of a regression, in the units of the data

    def text(self, digits: int = 1, width: int = 0) -> str:
        """The answer in one line; the first label is padded to `width`."""
        if not self.labels:
            return "(no label)"
        shares = [f"{probability:.{digits}%}" for probability in self.probabilities]
        if not width:
            return ", ".join(f"{label} {share}" for label, share in zip(self.labels, shares, strict=True))
        others = ", ".join(f"{label} {share}" for label, share in zip(self.labels[1:], shares[1:], strict=True))
        return f"{self.labels[0].ljust(width)}  {shares[0]:>6}  {others}".rstrip()

    def columns(self) -> list[str]:
        """The columns of a CSV file that hold such answers."""
        names = ["label", "probability"]
        for i in range(2, len(self.labels) + 1):
            names += [f"label_{i}", f"probability_{i}"]
        return names

    def cells(self) -> list[str]:
        """The answer in these columns."""
        pairs = zip(self.labels, self.probabilities, strict=True)
        return [cell for label, share in pairs for cell in (label, f"{share:.6f}")]

    def to_json(self) -> dict[str, Any]:
        return {"labels": self.labels, "probabilities": self.probabilities}


@dataclass(frozen=True)
class Confused:
    """A frequent mistake: a class predicted as another, or a label missed or wrongly predicted."""

    true: str
    said: str
    count: int
    of: int  # images on which it could have happened
    numbers: tuple[int, ...]  # examples


@dataclass(frozen=True)
class Headline:
    """A report's first sentence: before, the score, after."""

    before: str
    score: str
    after: str


@dataclass(frozen=True)
class Task(ABC):
    """Base of all tasks. A new task is a subclass in one file, made known by `tasks.register`."""

    classes: tuple[str, ...] = ()  # the names of the classes, labels or values

    name: ClassVar[str]  # in config.yaml, model.json and --task
    title: ClassVar[str]
    one: ClassVar[str]
    many: ClassVar[str]
    measures: ClassVar[tuple[Measure, ...]]  # overall, in the order to show; the first chooses the best epoch
    columns: ClassVar[tuple[Measure, ...]]  # of every class, label or value
    ranked: ClassVar[str]  # the column by which classes, labels or values are compared
    counted: ClassVar[bool] = True  # every class or label has images of its own: the `support` of its scores
    single: ClassVar[bool] = False  # one class per image: targets are class numbers, (N,)
    optional: ClassVar[bool] = False  # an image may have no label: an empty cell is one
    interchange: ClassVar[bool] = False  # formats of other libraries can express it
    answer: ClassVar[type[Answer]] = Answer  # what `answers` gives; without arguments, no answer
    meant: ClassVar[str] = "probabilities"  # what `meaning` gives; the name of that output in an exported file

    def __str__(self) -> str:
        """For example "multi-label, 12 labels"."""
        return f"{self.title}, {len(self.classes)} {self.one if len(self.classes) == 1 else self.many}"

    @classmethod
    def text(cls, name: str, value: float, digits: int = 1) -> str:
        """A measured number as people read it."""
        measure = next((known for known in (*cls.measures, *cls.columns) if known.name == name), Measure(name, name))
        return measure.text(value, digits)

    def telling(self, measure: str) -> bool:
        """Whether a measure says anything with these classes: top-5 of five classes does not."""
        return True

    @property
    def outputs(self) -> int:
        """The number of outputs, M, that a model needs for this task."""
        return len(self.classes)

    @property
    def output_names(self) -> tuple[str, ...]:
        """What each output stands for, (M,): what `explain` can explain."""
        return self.classes

    def matches(self, other: Task) -> bool:
        """Whether both have the same kind of targets and the same classes, in the same order."""
        return type(self) is type(other) and self.classes == other.classes

    # In files ---------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """What a model card keeps of it."""
        return {"task": self.name, **asdict(self)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Task:
        """The inverse of `to_json`; every constant is a number for each class."""
        classes = document["classes"]
        if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
            raise UserError(f"'classes' must be a list of names, but it is {classes!r}.")
        constants = [f.name for f in fields(cls) if f.name != "classes"]
        for name in constants:
            if len(document[name]) != len(classes):
                raise UserError(f"'{name}' must have a number for each of {len(classes)} {cls.many}.")
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
        """The task and the targets of label arrays, one array for each split."""
        raise UserError(f"{where}: {cls.title} labels cannot be read from arrays.")

    @abstractmethod
    def check(self, parts: Mapping[str, Targets], source: object) -> None:
        """Refuses targets, by split, from which nothing could be learnt or measured."""

    @abstractmethod
    def strata(self, targets: Targets, fraction: float) -> Numbers:
        """A group number for every image: groups are split evenly when `fraction` of the images is held out."""

    def settle(self, targets: Targets, keep: Numbers, held: Numbers) -> tuple[Numbers, Numbers]:
        """A last word on which images are kept and which are held out."""
        return keep, held

    @abstractmethod
    def reorder(self, targets: Targets, classes: Sequence[str]) -> Targets:
        """These targets, whose class names are all among `classes`, in the numbering of `classes`."""

    def adopt(self, model: Task, parts: Mapping[str, Targets], source: object) -> dict[str, Targets]:
        """The targets of every split in the numbering of a trained model's task."""
        for name in self.classes:
            if name not in model.classes:
                raise UserError(
                    f"{source} has a {self.one} '{name}' that the model does not know.{nearest(name, model.classes)} "
                    f"The model's {len(model.classes)} {self.many} are {shortlist(model.classes, 10)}."
                )
        return {split: self.reorder(targets, model.classes) for split, targets in parts.items()}

    @abstractmethod
    def describe(self, targets: Targets) -> Iterator[tuple[str, tuple[str, ...]]]:
        """The label of every image as text, and the classes, labels or values that it is an example of."""

    def counts(self, targets: Targets) -> Numbers | None:
        """The images of every class, (K,); None for a task without classes."""
        return None

    def statistics(self, targets: Targets) -> dict[str, Floats]:
        """A summary of training targets without classes: columns by name, (K,) each."""
        return {}

    def examples(self, targets: Targets, count: int, rng: np.random.Generator) -> dict[int, Numbers]:
        """Some images of every class or label, at most `count` each, by its number."""
        has = targets[:, None] == np.arange(len(self.classes)) if targets.ndim == 1 else targets > 0.5
        return {k: rng.permutation(np.flatnonzero(has[:, k]))[:count] for k in range(len(self.classes))}

    @property
    def remedy(self) -> str:
        """The options that help when classes are uneven."""
        return ""

    def fitted(self, targets: Targets) -> Task:
        """The task with the constants that training targets determine."""
        return self

    def measured(self, scores: Any) -> Task:
        """The task with the constants that validation scores determine."""
        return self

    # Training ---------------------------------------------------------------------------------------------

    def adapt(self, config: TrainConfig) -> TrainConfig:
        """A recipe's configuration with what does not suit the task taken out."""
        return config

    def check_settings(self, config: TrainConfig, given: Mapping[str, Any], source: str) -> TrainConfig:
        """Refuses settings that make no sense for the task; completes those of distillation."""
        return config

    @abstractmethod
    def objective(self, model: Model, config: TrainConfig, targets: Targets) -> Objective:
        """What training minimises, for training images with these targets."""

    def translate(self, outputs: Tensor, teacher: Task) -> Tensor:
        """Outputs for a teacher's task, in the teacher's order of classes, on the scale of this task's outputs."""
        return outputs

    # Answers ----------------------------------------------------------------------------------------------

    @abstractmethod
    def meaning(self, outputs: Tensor) -> Tensor:
        """Outputs (B, M) as probabilities or values, (B, K): the one definition, also inside exported graphs."""

    def means(self, outputs: NDArray[np.floating]) -> Floats:
        """`meaning` of an array, in double precision. A task whose `meaning` takes only tensors overrides it."""
        return np.asarray(self.meaning(outputs.astype(np.float64)))  # type: ignore[arg-type]  # see `arrays`

    def strength(self, outputs: Tensor) -> Tensor:
        """How strongly every output speaks, (B, M): what `explain` follows while patches are removed."""
        return self.meaning(outputs)

    @abstractmethod
    def answers(self, meant: NDArray[np.floating], top: int | None = None) -> list[Answer]:
        """What to say about images, from what `meaning` gave, (B, K); at most `top` labels each."""

    @abstractmethod
    def meter(self) -> Meter: ...

    def measure(self, outputs: NDArray[np.floating], targets: Targets) -> Any:
        """The scores of outputs, (N, M), that are all there."""
        meter = self.meter()
        meter.add(outputs, targets)
        return meter.scores()

    @abstractmethod
    def restore(self, document: Mapping[str, Any]) -> Scores:
        """The inverse of `Scores.to_json`, without the values of single images."""

    # Single predictions -----------------------------------------------------------------------------------

    @abstractmethod
    def losses(self, outputs: NDArray[np.floating], targets: Targets) -> Floats:
        """How wrong each prediction is, (N,): what "worst" means everywhere."""

    @abstractmethod
    def right(self, outputs: NDArray[np.floating], targets: Targets) -> NDArray[np.bool_]:
        """Whether each prediction is right, (N,)."""

    def worst(self, outputs: NDArray[np.floating], targets: Targets, count: int) -> Numbers:
        """The images with a wrong prediction, the highest loss first."""
        order = np.argsort(-self.losses(outputs, targets), kind="stable")
        return order[~self.right(outputs, targets)[order]][:count]

    def best(self, outputs: NDArray[np.floating], targets: Targets, count: int) -> Numbers:
        """The images with a right prediction, the lowest loss first."""
        order = np.argsort(self.losses(outputs, targets), kind="stable")
        return order[self.right(outputs, targets)[order]][:count]

    @abstractmethod
    def margins(self, outputs: NDArray[np.floating]) -> Floats:
        """How certain each prediction is, (N,)."""

    @abstractmethod
    def caption(self, meant: NDArray[np.floating], target: Any) -> list[Line]:
        """What to write under an image: what is true, and what was predicted."""

    def said(self, meant: NDArray[np.floating], target: Any) -> tuple[str, str]:
        """What was predicted for an image, and what is true, in a few words."""
        answer = self.answers(meant[None], 1 if self.single else None)[0]
        pairs = zip(answer.labels, answer.probabilities, strict=True)
        ((_, names),) = self.describe(np.asarray(target)[None])
        return ", ".join(f"{label} ({share:.0%})" for label, share in pairs) or "(none)", ", ".join(names)

    def confused(
        self,
        outputs: NDArray[np.floating],
        targets: Targets,
        most: int,
        examples: int,
    ) -> list[Confused]:
        """The most frequent mistakes, the most frequent first."""
        return []

    def ranking(self, outputs: NDArray[np.floating]) -> Numbers:
        """The outputs of every image from the likeliest to the least likely, (N, M)."""
        return np.argsort(-outputs, axis=1, kind="stable")

    @abstractmethod
    def same(self, given: Array, expected: Array, tolerance: float) -> NDArray[np.bool_]:
        """Whether two programs give the same answer for each image, by their outputs (N, M)."""

    @abstractmethod
    def differ(self, given: Array, expected: Array, tolerance: float) -> NDArray[np.bool_]:
        """Whether they differ although the answer is clear by more than the outputs may differ."""

    # Reports ----------------------------------------------------------------------------------------------

    @abstractmethod
    def charts(self, scores: Any) -> list[Chart]:
        """The charts of an evaluation."""

    @abstractmethod
    def sample(self, scores: Any, outputs: NDArray[np.floating] | None, targets: Targets | None) -> Samples:
        """Bootstrap samples of the scores; without outputs, of what the scores alone allow."""

    def groups(self, targets: Targets) -> tuple[Sequence[str], Numbers, str] | None:
        """Groups to colour images by: their names, each image's group, and what it is; None to colour by value."""
        return None

    @abstractmethod
    def goal(self, data: str) -> str:
        """What a model learns, as a verb phrase: "classify digits into 10 classes"."""

    @abstractmethod
    def headline(self, data: str, score: str, images: str) -> tuple[str, str]:
        """What stands before and after the main score in a report's first sentence, behind the model."""

    worst_title: ClassVar[str] = "Wrong predictions, highest loss first."
    best_title: ClassVar[str] = "Right predictions, lowest loss first."
    certain: ClassVar[str] = "smallest margin first"  # the order of the least certain predictions
