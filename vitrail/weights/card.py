"""All that makes tensors a model that can be used: the content of `model.json`."""

from __future__ import annotations

import dataclasses
import json
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vitrail.config import Task, from_plain
from vitrail.data.preprocess import Preprocess
from vitrail.data.targets import WORDS
from vitrail.errors import UserError
from vitrail.models import FAMILIES, ModelConfig, family
from vitrail.version import VERSION

# What a card must hold beside the classes to tell what the outputs mean.
_NUMBERS: dict[Task, tuple[str, ...]] = {
    "multiclass": (),
    "multilabel": ("thresholds",),
    "regression": ("target_mean", "target_std"),
}


def versions() -> dict[str, str]:
    """What a result was made with."""
    return {"vitrail": VERSION, "torch": torch.__version__, "python": platform.python_version()}


@dataclass(frozen=True, kw_only=True)
class Card:
    """The architecture, the classes, the preprocessing, and what was measured."""

    model: str
    config: ModelConfig
    classes: tuple[str, ...]  # of a regression, the names of the numbers
    preprocess: Preprocess
    task: Task = "multiclass"
    thresholds: tuple[float, ...] = ()  # multi-label: the probability from which on an image has each label
    target_mean: tuple[float, ...] = ()  # regression: outputs times std plus mean are in the units of the data
    target_std: tuple[float, ...] = ()
    teacher: dict[str, Any] = field(default_factory=dict)  # from which it learnt: model, source and metrics
    metrics: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=versions)

    def measured(self, metrics: dict[str, float]) -> Card:
        """The card of the same model after it was measured."""
        return dataclasses.replace(self, metrics=metrics)

    def standardising(self, targets: NDArray[Any]) -> Card:
        """The card of a model that is trained on these targets: of numbers, it keeps their mean and spread."""
        if self.task != "regression":
            return self
        numbers = targets.astype(np.float64)
        mean, std = numbers.mean(axis=0).tolist(), numbers.std(axis=0).tolist()
        return dataclasses.replace(self, target_mean=tuple(mean), target_std=tuple(std))

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"family": family(self.config)}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Card:
        classes = document["classes"]
        if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
            raise UserError(f"'classes' must be a list of names, but it is {classes!r}.")
        if len(classes) != document["config"]["classes"]:
            raise UserError(
                f"{len(classes)} classes are named, but the model tells {document['config']['classes']} apart."
            )
        task = document.get("task", "multiclass")  # older files do not say it
        if task not in _NUMBERS:
            raise UserError(f"'task' must be one of {', '.join(_NUMBERS)}, but it is {task!r}.")
        kind = document.get("family", "vit")  # older files hold ViTs
        if kind not in FAMILIES:
            raise UserError(f"'family' must be one of {', '.join(FAMILIES)}, but it is {kind!r}.")
        numbers = _NUMBERS[task]
        for name in numbers:
            if len(document[name]) != len(classes):
                raise UserError(f"'{name}' must have a number for each of {len(classes)} {WORDS[task].many}.")
        return cls(
            model=document["model"],
            config=from_plain(FAMILIES[kind][0], document["config"]),
            classes=tuple(classes),
            preprocess=Preprocess.from_json(document["preprocess"]),
            task=task,
            **{name: tuple(map(float, document[name])) for name in numbers},
            teacher=document.get("teacher", {}),  # not in older files
            metrics=document["metrics"],
            versions=document["versions"],
        )


def read_card(path: Path) -> Card:
    """The card in a file; anything else in it is a UserError."""
    try:
        return Card.from_json(json.loads(path.read_text(encoding="utf-8")))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path} is not a model card of vitrail: {error!r}.") from error
