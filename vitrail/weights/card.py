"""The model card, `model.json`: everything about a model except its tensors. Readable without torch."""

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
from vitrail.files import write_text
from vitrail.tasks import Task, task_type
from vitrail.tasks.scores import Scores
from vitrail.version import VERSION

if TYPE_CHECKING:
    from vitrail.models import ModelConfig

WEIGHTS_FILE = "model.safetensors"
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
        config: ModelConfig = from_plain(FAMILIES[self.family][0], self.values)
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
        if not self.classes:
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
        """The inverse of `to_json`; raises UserError for an inconsistent card."""
        task = task_type(document.get("task", "multiclass")).from_json(document)  # absent in older files: classifiers
        outputs = document["config"]["classes"]
        if (task.outputs if task.classes else 0) != outputs:
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


def write_card(path: Path, card: Card) -> None:
    """Writes a card to a JSON file."""
    write_text(path, json.dumps(card.to_json(), indent=2, ensure_ascii=False) + "\n")


def read_card(path: Path) -> Card:
    """The card in a file; raises UserError for any other content.

    The architecture is validated on first use of `Card.config`, which needs torch.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(document, dict):
            raise TypeError("it is not a JSON object")
        return Card.from_json(document)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path} is not a vitrail model card: {error!r}.") from error
