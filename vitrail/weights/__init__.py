"""Trained models as files: `model.safetensors` holds the tensors, `model.json` beside it everything else.

The card in `model.json` makes a model whole: its architecture, class names and preprocessing are what
`evaluate`, `predict`, `explain`, `export` and `serve` use. Weights of others have no card: theirs is made from what
their tensors and files show (`foreign.py`). Nothing here ever unpickles code.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save as to_bytes
from torch import Tensor

from vitrail.config import Size, Task, coerce, from_plain
from vitrail.data.preprocess import Preprocess
from vitrail.data.targets import WORDS
from vitrail.device import choose_device
from vitrail.errors import UserError, some
from vitrail.models import FAMILIES, Model, ModelConfig, build, canonical, family, filters, name_of, resample
from vitrail.models.vit import ViTConfig
from vitrail.progress import log, speak
from vitrail.version import VERSION
from vitrail.weights import foreign, hub
from vitrail.weights.files import replacing, write_text
from vitrail.weights.tensors import SUFFIXES, as_float, from_memory, open_tensors

WEIGHTS_FILE = "model.safetensors"
_FOREIGN_FILES = ("pytorch_model.bin",)  # what a folder of others may hold instead

# Distilled DeiT has a second head, on its distillation token; some families keep the layer in a module with others.
_HEADS = re.compile(r"head(_dist)?(\.fc)?\.(weight|bias)")

Source = str | Path | Mapping[str, Any]  # a run, a file, a name of the hub, or a state dict in memory

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
            metrics=document["metrics"],
            versions=document["versions"],
        )


def save(path: Path, model: Model, card: Card) -> None:
    """Writes the tensors to `path` (a `.safetensors` file) and the card beside them."""
    write_text(path.with_suffix(".json"), json.dumps(card.to_json(), indent=2, ensure_ascii=False) + "\n")
    with replacing(path) as temporary:
        temporary.write_bytes(to_bytes({name: value.contiguous() for name, value in model.state_dict().items()}))


def open_run(
    source: Source,
    device: str = "cpu",
    *,
    model: str | ModelConfig | None = None,
    classes: int | Sequence[str] | None = None,
    img_size: int | Size | None = None,
    channels: int | None = None,
) -> tuple[Model, Card]:
    """The model of a run or of anybody's weights, ready to predict, and its card. The rest is that of `load`."""
    opened = _open(source, expected=model)
    choose_device(device)
    card = _wanted(opened, classes, img_size, channels)
    with torch.device("meta"):
        whole = build(card.config)
    state, notes = _adapt(opened, card, whole)
    if notes:
        speak()
        for note in notes:
            log.info(f"From {opened.where}: {note}.")
    lent = isinstance(source, Mapping)  # tensors of another model, which must not change with this one
    whole.load_state_dict({name: value.to(device, copy=lent) for name, value in state.items()}, assign=True)
    return whole.eval(), card


def open_body(source: Source, device: str = "cpu") -> tuple[Model, Card]:
    """A model for its features alone: if it comes without a head, it gets an idle one."""
    return open_run(source, device, classes=None if _open(source).card.classes else 1)


def load(
    source: Source,
    model: str | ModelConfig | None = None,
    classes: int | Sequence[str] | None = None,
    img_size: int | Size | None = None,
    channels: int | None = None,
    *,
    device: str = "cpu",
) -> Model:
    """A trained model, ready to predict: `vitrail.load("runs/demo")`, `vitrail.load("ViT-B_16.npz", classes=10)`.

    `source` is a run, a weights file of vitrail, timm, Hugging Face, torchvision or JAX, `timm:NAME`, `hf:REPO`, or a
    state dict. `model` tells what its tensors do not show. Other classes get a new head, another size resampled
    positions, other channels folded or tiled filters; whatever is adapted is logged, and all else must fit.
    """
    return open_run(source, device, model=model, classes=classes, img_size=img_size, channels=channels)[0]


def locate(source: str | Path) -> Path:
    """The weights file that a run folder, a path or a name of the hub stands for."""
    if hub.is_hub(str(source)):
        return hub.fetch(str(source))
    path = Path(source)
    if path.is_dir():
        names = (WEIGHTS_FILE, *_FOREIGN_FILES)
        path = next((path / name for name in names if (path / name).exists()), path / WEIGHTS_FILE)
        if not path.exists() and (path.parent / "config.yaml").exists():
            raise UserError(
                f"The run {path.parent} has no {WEIGHTS_FILE} yet: its first epoch is not finished. "
                f"Go on with `vitrail train --resume {path.parent}`."
            )
    if not path.exists():
        raise UserError(f"{source} is neither a run folder nor a weights file: {path} does not exist.")
    if path.suffix not in SUFFIXES:
        raise UserError(f"Weights are read from run folders and {', '.join(SUFFIXES)} files, but {path} is neither.")
    return path


def home(source: str | Path) -> Path:
    """The folder in which results of a model are kept: its own, or the current one for models of the hub."""
    return Path() if hub.is_hub(str(source)) else locate(source).parent


def absolute(source: str) -> str:
    """A source that is found from any folder."""
    return source if hub.is_hub(source) else str(Path(source).expanduser().resolve())


def start_from(source: str | Path, model: Model, classes: tuple[str, ...], task: Task = "multiclass") -> list[str]:
    """Loads trained weights into a fresh model that may differ in size, channels and classes.

    Returns one sentence for everything that was adapted. Another body is a UserError: nothing is left out silently.
    """
    opened = _open(source)
    wanted = dataclasses.replace(opened.card, config=model.config, classes=classes, task=task)
    state, notes = _adapt(opened, wanted, model)
    model.load_state_dict(state)
    return notes


def open_card(source: str | Path) -> Card:
    """The card of a run or weights file, without reading a tensor. Without a head, no classes are named."""
    return _open(source).card


@dataclass(frozen=True)
class _Opened:
    """Weights that are known, but not yet read."""

    where: str
    card: Card
    weights: foreign.Weights
    own: bool  # has a card beside it
    notes: tuple[str, ...] = ()


def _open(source: Source, expected: str | ModelConfig | None = None) -> _Opened:
    """What a source is: by its card, or by what its tensors and the files beside it show."""
    if isinstance(source, Mapping):
        where, path, tensors = "The state dict", None, from_memory(source, "The state dict")
    else:
        path = locate(source)
        where, tensors = str(path), open_tensors(path)
    if path is not None and path.with_suffix(".json").exists():
        card = _read_card(path.with_suffix(".json"))
        if isinstance(expected, str) and canonical(expected)[0] != card.model:
            raise UserError(f"The weights in {where} are a {card.model}, but `model` asks for {expected}.")
        if isinstance(expected, ModelConfig) and expected != card.config:
            raise UserError(f"The weights in {where} are a {card.config}, but `model` asks for {expected}.")
        try:
            known = isinstance(card.config, ViTConfig)
            weights = foreign.recognise(tensors, where) if known else foreign.Weights(where, "timm", tensors)
            return _Opened(where, card, weights, own=True)
        except UserError as error:
            raise UserError(f"{where} does not fit the architecture in its {path.stem}.json: {error}") from error
    model = foreign.expected(expected)
    weights = foreign.recognise(tensors, where)
    beside = foreign.settings(weights.format, path.parent if path is not None else None)
    config = foreign.architecture(weights, beside, model)
    preprocess, assumed = foreign.preprocessing(weights, config, beside)
    has_head = "head.weight" in weights.shapes()
    fits = len(beside.classes) == config.classes
    classes = beside.classes if fits else tuple(map(str, range(config.classes)))
    card = Card(model=name_of(config), config=config, classes=classes if has_head else (), preprocess=preprocess)
    notes = [f"{weights.format} weights of a {card.model} at {config.img_size[0]}x{config.img_size[1]}"]
    notes += foreign.turned(weights, config)
    if beside.eps not in (None, 1e-6):
        notes.append(f"LayerNorm's epsilon is 1e-06 in all models here, not {beside.eps:g}")
    if len(tensors.wrapped) > 1:
        notes.append(f"taken from '{tensors.wrapped[0]}', not from {', '.join(map(repr, tensors.wrapped[1:]))}")
    return _Opened(where, card, weights, False, (*notes, assumed) if assumed else tuple(notes))


def _wanted(
    opened: _Opened, classes: int | Sequence[str] | None, img_size: int | Size | None, channels: int | None
) -> Card:
    """The card of the model that is asked for."""
    card = opened.card
    if classes is not None:
        count = classes if isinstance(classes, int) else len(classes)
        same = count == len(card.classes) and isinstance(classes, int)
        names = card.classes if same else tuple(map(str, range(count))) if isinstance(classes, int) else tuple(classes)
        if names != card.classes:
            fresh = dataclasses.replace(card, classes=names, task="multiclass", thresholds=(), metrics={})
            card = dataclasses.replace(fresh, target_mean=(), target_std=())
    elif not card.classes:
        raise UserError(
            f"{opened.where} has no head that tells classes apart. Ask for a new one: classes=N, or --classes N."
        )
    config, preprocess = card.config, card.preprocess
    size = config.img_size if img_size is None else coerce(type(config), "img_size", img_size)
    channels = config.channels if channels is None else coerce(type(config), "channels", channels)
    config = dataclasses.replace(config, classes=len(card.classes), img_size=size, channels=channels)
    mean, std = (
        values if len(values) in (1, channels) else (sum(values) / len(values),)
        for values in (preprocess.mean, preprocess.std)
    )
    preprocess = dataclasses.replace(preprocess, img_size=size, channels=channels, mean=mean, std=std)
    return dataclasses.replace(card, config=config, preprocess=preprocess)


def _adapt(opened: _Opened, wanted: Card, model: Model) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors for a model that may differ in size, channels and classes, and a sentence on each change."""
    card, where = opened.card, opened.where
    old, new = card.config, wanted.config
    if family(old) != family(new):
        raise UserError(f"The weights in {where} are a {card.model}, but the model to train is a {name_of(new)}.")
    state = opened.weights.read(old)
    notes = list(opened.notes)

    unneeded = foreign.pretraining(state)
    if card.classes != wanted.classes or card.task != wanted.task:
        state |= {name: torch.zeros(p.shape) for name, p in model.named_parameters() if _HEADS.fullmatch(name)}
        task = wanted.task
        things = WORDS[task].many if card.task == task else f"{WORDS[task].many} instead of {WORDS[card.task].many}"
        notes.append(f"new head for {len(wanted.classes)} {things}")
    if unneeded:
        notes.append(f"left out {some(unneeded, 4)}")
        state = {name: value for name, value in state.items() if name not in unneeded}
    shape = _meta_state(dataclasses.replace(old, classes=new.classes))
    wrong = _mismatch(state, shape)
    if wrong and opened.own:
        raise UserError(f"{where} does not fit the architecture in its {Path(where).stem}.json: {wrong}")
    if wrong:
        raise UserError(f"{where} is no {card.model} that vitrail can build: {wrong}")
    floats = [name for name, value in shape.items() if value.is_floating_point()]  # BatchNorm counts its batches
    other = sorted({str(state[name].dtype).removeprefix("torch.") for name in floats} - {"float32"})
    for name in floats:
        state[name] = as_float(name, state[name], where)  # one by one, so that what it replaces is freed
    if other:
        notes.append(f"{', '.join(other)} became float32")
    if old.grid != new.grid:
        resampled = resample(state, old, new)
        if any(resampled[name] is not state[name] for name in state):
            notes.append(f"positions resampled from {old.grid[0]}x{old.grid[1]} to {new.grid[0]}x{new.grid[1]} patches")
        state = resampled
    if old.channels != new.channels:
        name = filters(model)
        state[name] = _fit_channels(state[name], new.channels)
        notes.append(f"patch filters changed from {old.channels} to {new.channels} channels")
    wrong = _mismatch(state, model.state_dict())
    if wrong:
        raise UserError(
            f"The weights in {where} belong to a {card.model} with other settings than the model to train: {wrong}"
            "\nLeave out --model and its options to take them from the weights."
        )
    return state, notes


def _meta_state(config: ModelConfig) -> dict[str, Tensor]:
    with torch.device("meta"):
        return build(config).state_dict()


def _fit_channels(filters: Tensor, channels: int) -> Tensor:
    """First-layer filters for another number of channels that answer alike to the same grey picture."""
    mean = filters.mean(dim=1, keepdim=True)
    return mean.repeat(1, channels, 1, 1) * (filters.shape[1] / channels)


def _read_card(path: Path) -> Card:
    try:
        return Card.from_json(json.loads(path.read_text(encoding="utf-8")))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a model card of vitrail: {error!r}.") from error


def _mismatch(given: Mapping[str, Tensor], wanted: Mapping[str, Tensor], most: int = 12) -> str:
    """A short table of how two state dicts differ in names and shapes; empty if they do not."""
    wrong = [f"missing     {name} {tuple(wanted[name].shape)}" for name in wanted if name not in given]
    wrong += [f"unexpected  {name} {tuple(given[name].shape)}" for name in given if name not in wanted]
    wrong += [
        f"reshaped    {name} {tuple(given[name].shape)}, not {tuple(wanted[name].shape)}"
        for name in wanted
        if name in given and given[name].shape != wanted[name].shape
    ]
    more = [f"and {len(wrong) - most} more"] if len(wrong) > most else []
    return "".join(f"\n  {line}" for line in wrong[:most] + more)
