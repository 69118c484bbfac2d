"""The model card: the content of `model.json`, everything about a model but its tensors. Readable without torch."""

from __future__ import annotations

import dataclasses
import json
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.config import from_plain
from vitrail.data.preprocess import Preprocess
from vitrail.errors import UserError
from vitrail.tasks import Task, task_type
from vitrail.tasks.scores import Scores
from vitrail.version import VERSION

if TYPE_CHECKING:
    from vitrail.models import ModelConfig

WEIGHTS_FILE = "model.safetensors"


def versions() -> dict[str, str]:
    """The software that a result was made with."""
    import torch

    return {"vitrail": VERSION, "torch": torch.__version__, "python": platform.python_version()}


@dataclass(frozen=True)
class Architecture:
    """A model's configuration as a file has it: its family, and plain values."""

    family: str
    values: dict[str, Any]

    def build(self) -> ModelConfig:
        """The configuration itself, which needs the models and so torch."""
        from vitrail.models import FAMILIES

        if self.family not in FAMILIES:
            raise UserError(f"'family' must be one of {', '.join(FAMILIES)}, but it is {self.family!r}.")
        config: ModelConfig = from_plain(FAMILIES[self.family][0], self.values)
        return config


class _Config:
    """The field `Card.config`, which is built from an `Architecture` on first use."""

    def __get__(self, card: Card | None, owner: type) -> ModelConfig:
        if card is None:
            raise AttributeError("config")  # to a dataclass: there is no default
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
    task: Task  # with the class names, and the constants that give outputs their meaning
    preprocess: Preprocess
    teacher: dict[str, Any] = field(default_factory=dict)  # what it was distilled from: model, source and metrics
    metrics: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=versions)

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, labels or values; none of a model without a head."""
        return self.task.classes

    @property
    def numbered(self) -> bool:
        """Whether the classes have no names, only their numbers."""
        return self.classes == tuple(map(str, range(len(self.classes))))

    def measured(self, scores: Scores, epoch: int) -> Card:
        """The card of the same model with its validation scores and the constants that they determine."""
        task = self.task.measured(scores)
        return dataclasses.replace(self, task=task, metrics=scores.summary() | {"epoch": epoch})

    def architecture(self) -> Architecture:
        """The configuration in plain values, whether or not it has been built."""
        config = vars(self)["config"]
        if isinstance(config, Architecture):
            return config
        from vitrail.models import family

        return Architecture(family(config), dataclasses.asdict(config))

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
        """The inverse of `to_json`; a UserError if the parts of a card do not fit together."""
        task = task_type(document.get("task", "multiclass")).from_json(document)  # older files hold classifiers only
        outputs = document["config"]["classes"]
        if (task.outputs if task.classes else 0) != outputs:
            raise UserError(f"{len(task.classes)} {task.many} are named, but the model has {outputs} outputs.")
        return cls(
            model=document["model"],
            config=Architecture(document.get("family", "vit"), document["config"]),  # older files hold ViTs only
            task=task,
            preprocess=Preprocess.from_json(document["preprocess"]),
            teacher=document.get("teacher", {}),  # not in older files
            metrics=document["metrics"],
            versions=document["versions"],
        )


def read_card(path: Path) -> Card:
    """The card in a file; a UserError if the file holds anything else.

    The architecture is validated on first use of `Card.config`, because that needs torch.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(document, dict):
            raise TypeError("it is not a JSON object")
        return Card.from_json(document)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path} is not a model card of vitrail: {error!r}.") from error
