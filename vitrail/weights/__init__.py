"""Trained models as files: `model.safetensors` holds the tensors, `model.json` beside it everything else.

The card in `model.json` makes a model whole: its architecture, class names and preprocessing are what
`evaluate`, `predict`, `explain`, `export` and `serve` use. Nothing here ever unpickles code.
"""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor

from vitrail.config import Task, from_plain
from vitrail.data.preprocess import Preprocess
from vitrail.data.targets import WORDS
from vitrail.device import choose_device
from vitrail.errors import UserError
from vitrail.models import Model, ModelConfig, build
from vitrail.models.position import resample_state
from vitrail.version import VERSION
from vitrail.weights.files import replacing, write_text

WEIGHTS_FILE = "model.safetensors"

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
    """All that makes tensors a model that can be used: the content of `model.json`."""

    model: str
    config: ModelConfig
    classes: tuple[str, ...]  # of a regression, the names of the numbers
    preprocess: Preprocess
    task: Task = "multiclass"
    thresholds: tuple[float, ...] = ()  # multi-label: the probability from which on an image has each label
    target_mean: tuple[float, ...] = ()  # regression: outputs times std plus mean are in the units of the data
    target_std: tuple[float, ...] = ()
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
        return dataclasses.asdict(self)

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
        numbers = _NUMBERS[task]
        for name in numbers:
            if len(document[name]) != len(classes):
                raise UserError(f"'{name}' must have a number for each of {len(classes)} {WORDS[task].many}.")
        return cls(
            model=document["model"],
            config=from_plain(ModelConfig, document["config"]),
            classes=tuple(classes),
            preprocess=Preprocess.from_json(document["preprocess"]),
            task=task,
            **{name: tuple(map(float, document[name])) for name in numbers},
            metrics=document["metrics"],
            versions=document["versions"],
        )


def save(path: Path, model: Model, card: Card) -> None:
    """Writes the tensors to `path` (a `.safetensors` file) and the card beside them."""
    write_text(path.with_suffix(".json"), json.dumps(card.to_json(), indent=2, ensure_ascii=False) + "\n")
    with replacing(path) as temporary:
        temporary.write_bytes(to_bytes({name: value.contiguous() for name, value in model.state_dict().items()}))


def open_run(source: str | Path, device: str = "cpu") -> tuple[Model, Card]:
    """The model of a run folder or of a `.safetensors` file with its card, ready to predict."""
    path = locate(source)
    card = open_card(path)
    choose_device(device)
    with torch.device("meta"):
        model = build(card.config)
    state = _read_tensors(path, device)
    wrong = _mismatch(state, model.state_dict())
    if wrong:
        raise UserError(f"{path} does not fit the architecture in its {path.stem}.json: {wrong}.")
    model.load_state_dict(state, assign=True)
    return model.eval(), card


def load(source: str | Path, device: str = "cpu") -> Model:
    """A trained model, ready to predict: `vitrail.load("runs/demo")`."""
    return open_run(source, device)[0]


def locate(source: str | Path) -> Path:
    """The weights file that a run folder or a path stands for."""
    path = Path(source)
    if path.is_dir():
        path = path / WEIGHTS_FILE
        if not path.exists() and (path.parent / "config.yaml").exists():
            raise UserError(
                f"The run {path.parent} has no {WEIGHTS_FILE} yet: its first epoch is not finished. "
                f"Go on with `vitrail train --resume {path.parent}`."
            )
    if not path.exists():
        raise UserError(f"{source} is neither a run folder nor a weights file: {path} does not exist.")
    if path.suffix != ".safetensors":
        raise UserError(f"Weights are read from .safetensors files and run folders, but {path} is neither.")
    return path


def start_from(source: str | Path, model: Model, classes: tuple[str, ...], task: Task = "multiclass") -> list[str]:
    """Loads trained weights into a fresh model that may differ in size, channels and classes.

    Returns one sentence for everything that was adapted. Another body is a UserError: nothing is left out silently.
    """
    path = locate(source)
    card = open_card(path)
    state = _read_tensors(path, "cpu")
    old, new = card.config, model.config
    notes = []

    if old.grid != new.grid:
        state = resample_state(state, old.grid, new.grid)
        notes.append(f"positions resampled from {old.grid[0]}x{old.grid[1]} to {new.grid[0]}x{new.grid[1]} patches")
    if old.channels != new.channels:
        name = "patch_embed.proj.weight" if "patch_embed.convs.0.weight" not in state else "patch_embed.convs.0.weight"
        state[name] = _fit_channels(state[name], new.channels)
        notes.append(f"patch filters changed from {old.channels} to {new.channels} channels")
    if card.classes != classes or card.task != task:
        fresh = model.state_dict()
        state |= {name: fresh[name] for name in ("head.weight", "head.bias")}
        things = WORDS[task].many if card.task == task else f"{WORDS[task].many} instead of {WORDS[card.task].many}"
        notes.append(f"new head for {len(classes)} {things}")
    wrong = _mismatch(state, model.state_dict())
    if wrong:
        raise UserError(
            f"The weights in {path} belong to a {card.model} with other settings than the model to train: {wrong}. "
            "Leave out --model and its options to take them from the weights."
        )
    model.load_state_dict(state)
    return notes


def _fit_channels(filters: Tensor, channels: int) -> Tensor:
    """First-layer filters for another number of channels that answer alike to the same grey picture."""
    mean = filters.mean(dim=1, keepdim=True)
    return mean.repeat(1, channels, 1, 1) * (filters.shape[1] / channels)


def open_card(source: str | Path) -> Card:
    """The card of a run or weights file, without reading a tensor."""
    path = locate(source).with_suffix(".json")
    try:
        return Card.from_json(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise UserError(
            f"{path} is missing: it holds the architecture and class names of the weights beside it."
        ) from None
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a model card of vitrail: {error!r}.") from error


def _read_tensors(path: Path, device: str) -> dict[str, Tensor]:
    try:
        return load_file(path, device=device)
    except (safetensors.SafetensorError, OSError) as error:
        raise UserError(f"{path} is corrupt or truncated: {error}. Copy it again, or train it again.") from error


def _mismatch(given: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str:
    """In a few words, how two state dicts differ in names and shapes; empty if they do not."""
    wrong = [f"{name} is missing" for name in wanted if name not in given]
    wrong += [f"{name} is not known" for name in given if name not in wanted]
    wrong += [
        f"{name} is {tuple(given[name].shape)}, not {tuple(wanted[name].shape)}"
        for name in wanted
        if name in given and given[name].shape != wanted[name].shape
    ]
    return ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
