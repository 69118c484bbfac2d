"""The model card: the content of `model.json`, everything about a model but its tensors. Readable without torch."""

from __future__ import annotations

import dataclasses
import json
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitrail.config import Task, from_plain
from vitrail.data.preprocess import Preprocess
from vitrail.data.targets import WORDS
from vitrail.errors import UserError
from vitrail.version import VERSION

if TYPE_CHECKING:
    from vitrail.models import ModelConfig

WEIGHTS_FILE = "model.safetensors"

# The constants that give outputs their meaning, by task.
_CONSTANTS: dict[Task, tuple[str, ...]] = {
    "multiclass": (),
    "multilabel": ("thresholds",),
    "regression": ("target_mean", "target_std"),
}


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
    classes: tuple[str, ...]  # for regression, the names of the numbers
    preprocess: Preprocess
    task: Task = "multiclass"
    thresholds: tuple[float, ...] = ()  # multi-label: the smallest probability at which an image has each label
    target_mean: tuple[float, ...] = ()  # regression: outputs * std + mean are in the units of the data
    target_std: tuple[float, ...] = ()
    teacher: dict[str, Any] = field(default_factory=dict)  # what it was distilled from: model, source and metrics
    metrics: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=versions)

    @property
    def numbered(self) -> bool:
        """Whether the classes have no names, only their numbers."""
        return self.classes == tuple(map(str, range(len(self.classes))))

    def measured(self, metrics: dict[str, float]) -> Card:
        """The card of the same model with these metrics."""
        return dataclasses.replace(self, metrics=metrics)

    def standardising(self, targets: NDArray[Any]) -> Card:
        """The card of a model trained on these targets: for regression, with their mean and standard deviation."""
        if self.task != "regression":
            return self
        numbers = targets.astype(np.float64)
        mean, std = numbers.mean(axis=0).tolist(), numbers.std(axis=0).tolist()
        return dataclasses.replace(self, target_mean=tuple(mean), target_std=tuple(std))

    def architecture(self) -> Architecture:
        """The configuration in plain values, whether or not it has been built."""
        config = vars(self)["config"]
        if isinstance(config, Architecture):
            return config
        from vitrail.models import family

        return Architecture(family(config), dataclasses.asdict(config))

    def to_json(self) -> dict[str, Any]:
        architecture = self.architecture()
        document = {
            name: dataclasses.asdict(value) if name == "preprocess" else value for name, value in vars(self).items()
        }
        return document | {"config": architecture.values, "family": architecture.family}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Card:
        """The inverse of `to_json`; a UserError if the parts of a card do not fit together."""
        classes = document["classes"]
        if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
            raise UserError(f"'classes' must be a list of names, but it is {classes!r}.")
        if len(classes) != document["config"]["classes"]:
            raise UserError(f"{len(classes)} classes are named, but the model has {document['config']['classes']}.")
        task = document.get("task", "multiclass")  # not in older files
        if task not in _CONSTANTS:
            raise UserError(f"'task' must be one of {', '.join(_CONSTANTS)}, but it is {task!r}.")
        constants = _CONSTANTS[task]
        for name in constants:
            if len(document[name]) != len(classes):
                raise UserError(f"'{name}' must have a number for each of {len(classes)} {WORDS[task].many}.")
        return cls(
            model=document["model"],
            config=Architecture(document.get("family", "vit"), document["config"]),  # older files hold ViTs only
            classes=tuple(classes),
            preprocess=Preprocess.from_json(document["preprocess"]),
            task=task,
            **{name: tuple(map(float, document[name])) for name in constants},
            teacher=document.get("teacher", {}),  # not in older files
            metrics=document["metrics"],
            versions=document["versions"],
        )


def read_card(path: Path) -> Card:
    """The card in a file; a UserError if the file holds anything else.

    The architecture is validated on first use of `Card.config`, because that needs torch.
    """
    try:
        return Card.from_json(json.loads(path.read_text(encoding="utf-8")))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path} is not a model card of vitrail: {error!r}.") from error
