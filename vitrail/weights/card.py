"""The model card, `model.json`: everything about a model except its tensors. Readable without torch."""

from __future__ import annotations

import dataclasses
import json
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.config import coerce
from vitrail.data.preprocess import Preprocess
from vitrail.errors import UserError, shown
from vitrail.files import read_text, reading, write_text
from vitrail.tasks import Task, task_type
from vitrail.tasks.scores import Scores
from vitrail.version import VERSION

if TYPE_CHECKING:
    from vitrail.models import ModelConfig

WEIGHTS_FILE = "model.safetensors"
_TEACHER = ("model", "source")
DECODER_FILE = "decoder.safetensors"  # of a self-supervised run: what learnt beside the model


def versions() -> dict[str, str]:
    """The software versions behind a result."""
    import torch

    return {"vitrail": VERSION, "torch": torch.__version__, "python": platform.python_version()}


@dataclass(frozen=True)
class Architecture:
    """A model's configuration as stored in a file: its family, and plain values."""

    family: str
    values: dict[str, Any]

    def build(self) -> ModelConfig:
        """The configuration object; needs the models, and so torch."""
        from vitrail.models import FAMILIES
        from vitrail.models.module import FAMILY

        if self.family == FAMILY and FAMILY not in FAMILIES:
            name = self.values.get("name")
            raise UserError(
                f"The model is a Python module, '{name}', which is not stored with its weights. Make it known first: "
                f"vitrail.models.register_module({name}(…))."
            )
        if self.family not in FAMILIES:
            raise UserError(
                f"'family' must be one of {', '.join(FAMILIES)}, but it is {self.family!r}. If it is your own, first "
                "call vitrail.models.register."
            )
        config: ModelConfig = FAMILIES[self.family][0].from_plain(self.values)
        return config


class _Config:
    """The field `Card.config`, which is built from an `Architecture` on first use."""

    def __get__(self, card: Card | None, owner: type) -> ModelConfig:
        if card is None:
            raise AttributeError("config")  # tells dataclasses that there is no default
        config = vars(card)["config"]
        if isinstance(config, Architecture):
            config = vars(card)["config"] = config.build()
        return config

    def __set__(self, card: Card, config: ModelConfig | Architecture) -> None:
        vars(card)["config"] = config


@dataclass(frozen=True, kw_only=True)
class Card:
    """The architecture, the classes, the preprocessing and the metrics of a model."""

    model: str
    config: _Config = _Config()
    task: Task  # with the class names and the constants that turn outputs into answers
    preprocess: Preprocess
    teacher: dict[str, Any] = field(default_factory=dict)  # of distillation: model, source and metrics
    metrics: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=versions)

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, labels or values; empty for a headless model."""
        return self.task.classes

    @property
    def outputs(self) -> int:
        """The number of model outputs; 0 for a headless model."""
        return max(self.task.outputs, 0)

    @property
    def numbered(self) -> bool:
        """Whether classes are named by their indices only."""
        return self.classes == tuple(map(str, range(len(self.classes))))

    def need_head(self, source: object, otherwise: str) -> None:
        """Raises UserError for a model without a head; `otherwise` says what to do if it is not a pre-trained one."""
        if not self.task.labelled:
            raise UserError(
                f"{source} was pre-trained by {self.task.title} and has no head. Fine-tune it with `vitrail train "
                f"LABELLED --weights {source}`, or measure its features with `vitrail evaluate {source} LABELLED "
                "--method knn`."
            )
        if not self.outputs:
            raise UserError(f"{source} has no classification head{otherwise}")

    def measured(self, scores: Scores, epoch: int) -> Card:
        """The card with validation scores and the constants determined by them."""
        task = self.task.measured(scores)
        return dataclasses.replace(self, task=task, metrics=scores.summary() | {"epoch": epoch})

    def architecture(self) -> Architecture:
        """The configuration as plain values, built or not."""
        config = vars(self)["config"]
        if isinstance(config, Architecture):
            return config
        from vitrail.models import family

        return Architecture(family(config), config.to_plain())

    def to_json(self) -> dict[str, Any]:
        architecture = self.architecture()
        return {
            "model": self.model,
            "family": architecture.family,
            "config": architecture.values,
            **self.task.to_json(),
            "preprocess": dataclasses.asdict(self.preprocess),
            "teacher": self.teacher,
            "metrics": self.metrics,
            "versions": self.versions,
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Card:
        """The inverse of `to_json`; raises UserError for an inconsistent card."""
        task = task_type(document.get("task", "multiclass")).from_json(document)  # absent in older files: classifiers
        _check_types(document)
        outputs = document["config"]["classes"]
        if max(task.outputs, 0) != outputs:
            raise UserError(f"The card names {len(task.classes)} {task.many}, but the model has {outputs} outputs.")
        return cls(
            model=document["model"],
            config=Architecture(document.get("family", "vit"), document["config"]),  # absent in older files: ViTs
            task=task,
            preprocess=Preprocess.from_json(document["preprocess"]),
            teacher=document.get("teacher", {}),  # absent in older files
            metrics=document["metrics"],
            versions=document["versions"],
        )


def _check_types(document: dict[str, Any]) -> None:
    """Raises UserError if a part of a card that is only shown, such as its metrics, has the wrong type."""
    teacher = document.get("teacher") or {}
    shape = {"metrics": document["metrics"], "versions": document["versions"], "config": document["config"]}
    if not isinstance(teacher, dict):
        raise UserError(f"'teacher' must be an object, but it is {shown(teacher)}.")
    shape["metrics of the teacher"] = teacher["metrics"] if teacher else {}
    for name, value in shape.items():
        if not isinstance(value, dict):
            raise UserError(f"'{name}' must be an object, but it is {shown(value)}.")
    for name in ("metrics", "metrics of the teacher"):
        if wrong := [value for value in shape[name].values() if type(value) not in (int, float)]:
            raise UserError(f"'{name}' must be numbers, but one is {shown(wrong[0])}.")
    texts = {
        "model": document["model"],
        **document["versions"],
        **{name: teacher[name] for name in _TEACHER if teacher},
    }
    for name, value in texts.items():
        if not isinstance(value, str):
            raise UserError(f"'{name}' must be text, but it is {shown(value)}.")
    if "img_size" in document["config"]:
        size, seen = (coerce(Preprocess, "img_size", document[part]["img_size"]) for part in ("config", "preprocess"))
        if size != seen:
            raise UserError(f"The model reads images of {size}, but the preprocessing makes images of {seen}.")


def write_card(path: Path, card: Card) -> None:
    """Writes a card to a JSON file."""
    write_text(path, json.dumps(card.to_json(), indent=2, ensure_ascii=False) + "\n")


def read_card(path: Path) -> Card:
    """The card in a file; raises UserError for any other content.

    The architecture is validated on first use of `Card.config`, which needs torch.
    """
    with reading(path, "a vitrail model card"):
        document = json.loads(read_text(path))
        if not isinstance(document, dict):
            raise TypeError("it is not a JSON object")
        try:
            return Card.from_json(document)
        except UserError as error:
            raise UserError(f"{path}: {error}") from error
