"""Loads trained models: runs, weights files of any supported format, hub names, state dicts.

vitrail's own weights come with a model card. For others, a card is inferred from the tensors and the files next to them
(`recognise.py`). Pickled code is never executed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as to_bytes
from torch import Tensor

from vitrail.config import CONFIG_FILE, Size, coerce
from vitrail.device import choose_device
from vitrail.errors import UserError
from vitrail.files import atomic_write
from vitrail.models import FAMILIES, Model, ModelConfig, build, canonical, family, name_of, resized_state
from vitrail.models.position import Interpolation
from vitrail.models.vit import ViTConfig
from vitrail.progress import log, log_to_console
from vitrail.tasks import Multiclass, Task
from vitrail.weights import hub, recognise
from vitrail.weights.card import WEIGHTS_FILE, Card, read_card, write_card
from vitrail.weights.formats import vit
from vitrail.weights.sharded import INDEXES, is_index, open_sharded
from vitrail.weights.tensors import SUFFIXES, Tensors, as_float, from_state_dict, open_tensors

_IN_FOLDERS = (WEIGHTS_FILE, INDEXES[0], "pytorch_model.bin", INDEXES[1])  # in order of preference

# A distilled DeiT has a second head, on its distillation token; some families nest the layer in a head module.
_HEADS = re.compile(r"head(_dist)?(\.fc)?\.(weight|bias)")
_HIDDEN = re.compile(r"(head\.)?pre_logits\..*")  # the hidden layer of the head

_NAMELESS = "vit_w"  # the prefix of model names that encode an unlisted size
_PARTIAL = "Load the tensors that fit with partial=True, or with --partial of train and convert."

Source = str | Path | Mapping[str, Any]  # a run, a file, a hub name, or a state dict


def save(path: Path, model: Model, card: Card) -> None:
    """Writes the tensors to `path`, a `.safetensors` file, and the card next to it."""
    write_card(path.with_suffix(".json"), card)
    with atomic_write(path) as temporary:
        temporary.write_bytes(to_bytes({name: value.contiguous() for name, value in model.state_dict().items()}))


def open_run(
    source: Source,
    device: str = "cpu",
    *,
    model: str | ModelConfig | None = None,
    classes: int | Sequence[str] | None = None,
    img_size: int | Size | None = None,
    channels: int | None = None,
    resample: Interpolation | None = None,
    partial: bool = False,
    headless: bool = False,
) -> tuple[Model, Card]:
    """The model of a run or other weights, in evaluation mode, and its card. The options are those of `load`.

    Weights without a head raise UserError, unless `headless` is set: then only features are needed.
    """
    opened = _open(source, expected=model)
    choose_device(device)
    card = _wanted(opened, classes, img_size, channels)
    if not headless:
        where = opened.where if isinstance(source, Mapping) else source
        card.need_head(where, ". Add a new one with classes=N, or --classes N.")
    whole = _on_meta(card.config)
    state, notes = _adapt(opened, card, whole, resample, partial)
    if partial and (missing := whole.state_dict().keys() - state.keys()):
        fresh = build(card.config).state_dict()
        state |= {name: fresh[name] for name in missing}
    if notes:
        log_to_console()
        for note in notes:
            log.info(f"From {opened.where}: {note}.")
    lent = isinstance(source, Mapping)  # the caller's tensors, which must not change with this model
    seen: set[int] = set()
    for name, value in state.items():
        shared = value.data_ptr() in seen  # two names for one tensor become two parameters
        seen.add(value.data_ptr())
        state[name] = value.to(device, copy=lent or shared)
    whole.load_state_dict(state, assign=True)
    whole.card = card
    return whole.eval(), card


def load(
    source: Source,
    model: str | ModelConfig | None = None,
    classes: int | Sequence[str] | None = None,
    img_size: int | Size | None = None,
    channels: int | None = None,
    *,
    resample: Interpolation | None = None,
    partial: bool = False,
    device: str = "cpu",
) -> Model:
    """A trained model in evaluation mode: `vitrail.load("runs/demo")`, `vitrail.load("ViT-B_16.npz", classes=10)`.

    `source` is a run, a weights file of vitrail, timm, Hugging Face, torchvision or JAX, `timm:NAME`, `hf:REPO`, or a
    state dict. `model` names the architecture if the tensors do not determine it. Other `classes` give a new head,
    `classes=0` none; another `img_size` resamples position embeddings, as the library of the weights does unless
    `resample` names another way; other `channels` adapt the first filters. Adaptations are logged; all other tensors
    must fit. With `partial`, tensors that do not fit are skipped and missing ones are initialised. Weights without a
    head give a headless model, which returns features.
    """
    whole, _ = open_run(
        source,
        device,
        model=model,
        classes=classes,
        img_size=img_size,
        channels=channels,
        resample=resample,
        partial=partial,
        headless=True,
    )
    return whole


def locate(source: str | Path) -> Path:
    """The weights file of a run folder, a path or a hub name."""
    if hub.is_hub(str(source)):
        return hub.fetch(str(source))
    path = Path(source)
    try:
        if path.is_dir():
            path = next((path / name for name in _IN_FOLDERS if (path / name).exists()), path / WEIGHTS_FILE)
            if not path.exists() and (path.parent / CONFIG_FILE).exists():
                raise UserError(
                    f"The run {path.parent} has no {WEIGHTS_FILE} yet: its first epoch is not finished. "
                    "Continue it with --resume."
                )
        if not path.exists():
            raise UserError(f"{source} is neither a run folder nor a weights file: {path} does not exist.")
    except OSError as error:  # a folder without permission, or a name that is too long
        raise UserError(f"{str(source)[:80]} cannot be opened: {error.strerror}.") from error
    if path.suffix not in SUFFIXES and not is_index(path):
        raise UserError(f"Weights must be a run folder or a {', '.join(SUFFIXES)} file, but {path} is neither.")
    return path


def home(source: str | Path) -> Path:
    """The folder for results of a model: its own, or the current one for hub models."""
    return Path() if hub.is_hub(str(source)) else locate(source).parent


def absolute(source: str) -> str:
    """A source that can be found from any folder."""
    return hub.full_name(source) if hub.is_hub(source) else str(Path(source).expanduser().resolve())


def open_source(source: Source, first: str = "") -> tuple[str, Path | None, Tensors]:
    """The name of a source, its file (None for a state dict), and its tensors.

    `first` is the key to prefer in a checkpoint with several models.
    """
    if isinstance(source, Mapping):
        return "The state dict", None, from_state_dict(source, "The state dict", first)
    path = locate(source)
    return str(path), path, open_sharded(path) if is_index(path) else open_tensors(path, first)


def start_from(
    source: Source,
    model: Model,
    task: Task,
    *,
    resample: Interpolation | None = None,
    partial: bool = False,
) -> list[str]:
    """Loads trained weights into a fresh model that may differ in size, channels and classes.

    Returns a note on each adaptation. Another architecture raises UserError, unless `partial` loads what fits; no
    tensor is skipped silently.
    """
    opened = _open(source, like=model.config)
    wanted = dataclasses.replace(opened.card, config=model.config, task=task)
    state, notes = _adapt(opened, wanted, model, resample, partial)
    model.load_state_dict(state, strict=not partial)
    return notes


def open_card(source: str | Path, model: str | None = None) -> Card:
    """The card of a run or weights file, without loading tensors. Without a head, it has no classes.

    `model`, a model name or that of a card, resolves what the tensors do not determine.
    """
    named = model is not None and not model.startswith(_NAMELESS) and model not in (*FAMILIES, "deit")
    config = canonical(model)[1] if model and named else None
    return _open(source, like=config).card


@dataclass(frozen=True)
class _Opened:
    """Identified weights, not loaded yet."""

    where: str
    card: Card
    weights: recognise.Weights
    own: bool  # has vitrail's own card
    notes: tuple[str, ...] = ()


def _open(source: Source, expected: str | ModelConfig | None = None, like: ModelConfig | None = None) -> _Opened:
    """Identifies a source by its card, or by its tensors and the files next to it.

    An architecture other than `expected` raises UserError; `like` resolves the number of heads if nothing else does.
    """
    where, path, tensors = open_source(source)
    if path is not None and not is_index(path) and path.with_suffix(".json").exists():
        card = _own_card(path.with_suffix(".json"))
        if isinstance(expected, str) and canonical(expected)[0] != card.model:
            raise UserError(f"The weights in {where} are a {card.model}, but `model` asks for {expected}.")
        if isinstance(expected, ModelConfig) and expected != card.config:
            raise UserError(f"The weights in {where} are a {card.config}, but `model` asks for {expected}.")
        try:
            weights = recognise.of_family(tensors, where, family(card.config))
            return _Opened(where, card, weights, own=True)
        except UserError as error:
            raise UserError(f"{where} does not fit the architecture in its {path.stem}.json: {error}") from error
    model = recognise.expected(expected)
    weights = recognise.recognise(tensors, where)
    sidecar = recognise.read_sidecar(weights, path.parent if path is not None else None, like)
    config = recognise.architecture(weights, sidecar, model)
    preprocess, assumed = recognise.preprocessing(weights, config, sidecar)
    shapes = weights.shapes()
    fits = len(sidecar.classes) == config.classes
    classes = sidecar.classes if fits else tuple(map(str, range(config.classes)))
    card = Card(model=name_of(config), config=config, task=Multiclass(classes), preprocess=preprocess)
    notes = [f"{weights.format} weights of a {card.model} at {config.img_size[0]}x{config.img_size[1]}"]
    if isinstance(config, ViTConfig):
        notes += vit.conversion_notes(shapes, config)
    eps = weights.spec.eps
    if sidecar.eps not in (None, eps) and "eps" not in {field.name for field in dataclasses.fields(config)}:
        notes.append(f"LayerNorm's epsilon is {eps:g} for {weights.kind}, not {sidecar.eps:g}")
    if len(tensors.wrapped) > 1:
        notes.append(f"loaded '{tensors.wrapped[0]}', not {', '.join(map(repr, tensors.wrapped[1:]))}")
    return _Opened(where, card, weights, False, (*notes, assumed) if assumed else tuple(notes))


def _own_card(path: Path) -> Card:
    """The card in a file, with its architecture validated."""
    card = read_card(path)
    try:
        _ = card.config
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except TypeError as error:  # 'family' is not a string
        raise UserError(f"{path} is not a vitrail model card: {error!r}.") from error
    return card


def _wanted(
    opened: _Opened, classes: int | Sequence[str] | None, img_size: int | Size | None, channels: int | None
) -> Card:
    """The card of the requested model."""
    card = opened.card
    if classes is not None:
        count = classes if isinstance(classes, int) else len(classes)
        same = count == len(card.classes) and isinstance(classes, int)
        names = card.classes if same else tuple(map(str, range(count))) if isinstance(classes, int) else tuple(classes)
        if names != card.classes:
            card = dataclasses.replace(card, task=Multiclass(names), metrics={})
    config, preprocess = card.config, card.preprocess
    size = config.img_size if img_size is None else coerce(type(config), "img_size", img_size)
    channels = config.channels if channels is None else coerce(type(config), "channels", channels)
    outputs = card.task.outputs if card.classes else 0
    config = dataclasses.replace(config, classes=outputs, img_size=size, channels=channels)
    mean, std = (
        values if len(values) in (1, channels) else (sum(values) / len(values),)
        for values in (preprocess.mean, preprocess.std)
    )
    preprocess = dataclasses.replace(preprocess, img_size=size, channels=channels, mean=mean, std=std)
    return dataclasses.replace(card, config=config, preprocess=preprocess)


def _adapt(
    opened: _Opened, wanted: Card, model: Model, resample: Interpolation | None, partial: bool
) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors for a model that may differ in size, channels and classes, and a note on each change.

    Tensors of the model can be missing only if partial loading is allowed.
    """
    card, where = opened.card, opened.where
    old, new = card.config, wanted.config
    if family(old) != family(new):
        raise UserError(f"The weights in {where} are a {card.model}, but the model to train is a {name_of(new)}.")
    state = opened.weights.read(old)
    notes = list(opened.notes)

    unneeded, words = recognise.pretraining_only(state)
    fresh = not card.task.matches(wanted.task)  # then the old head is not needed
    if fresh and wanted.classes:
        new_ones, old_ones = wanted.task.many, card.task.many
        things = new_ones if new_ones == old_ones or not card.classes else f"{new_ones} instead of {old_ones}"
        notes.append(f"new head for {len(wanted.classes)} {things}")
    elif fresh and card.classes:
        notes.append("left out the head")
    elif not wanted.classes and (hidden := [name for name in state if _HIDDEN.fullmatch(name)]):
        unneeded += hidden
        notes.append("left out the hidden layer before the head")
    if words and wanted.task.labelled:  # else `added` says what becomes of it
        notes.append(f"left out {words}, which only pre-training needs")
    behind = [_HEADS] if wanted.classes else [_HEADS, _HIDDEN]
    leave = (*unneeded, *(name for name in state if fresh and any(part.fullmatch(name) for part in behind)))
    state = {name: value for name, value in state.items() if name not in leave}
    body = _on_meta(dataclasses.replace(old, classes=new.classes) if fresh else old)
    expected = body.state_dict()
    hidden = [name for name in expected if _HIDDEN.fullmatch(name) and not old.classes and name not in state]
    if fresh:
        expected = {n: value for n, value in expected.items() if n not in hidden and not _HEADS.fullmatch(n)}
    broken = _mismatch(state, expected)
    if broken and not partial:
        no = f"does not fit the architecture in its {Path(where).stem}.json"
        no = no if opened.own else f"does not match a {card.model}"
        raise UserError(f"{where} {no}:{_table(broken)}\n{_PARTIAL}")
    state = {name: value for name, value in state.items() if name not in broken}
    floats = [name for name in state if expected[name].is_floating_point()]  # BatchNorm's batch counters are integers
    other = sorted({str(state[name].dtype).removeprefix("torch.") for name in floats} - {"float32"})
    for name in floats:
        state[name] = as_float(name, state[name], where)  # one at a time, to free the original
    if other:
        notes.append(f"converted from {', '.join(other)} to float32")
    resized = resized_state(state, old, new, resample)
    if any(resized[name] is not state[name] for name in state):
        sizes = f"{old.grid[0]}x{old.grid[1]} to {new.grid[0]}x{new.grid[1]} patches"
        notes.append(f"position embeddings resampled from {sizes} ({resample or old.resample})")
    state = resized
    first = body.filters()
    if old.channels != new.channels and first in state:
        state[first] = _fit_channels(state[first], new.channels)
        notes.append(f"patch filters adapted from {old.channels} to {new.channels} channels")
    if fresh:
        heads = {name: value for name, value in model.named_parameters() if _HEADS.fullmatch(name)}
        state |= {name: torch.zeros(value.shape) for name, value in heads.items()}
        if hidden:  # initialised with the head
            start = build(new).state_dict()
            state |= {name: start[name] for name in hidden}
    wrong = _mismatch(state, model.state_dict())
    for name in [f.name for f in dataclasses.fields(old) if f.name in recognise.NOT_IN_TENSORS]:
        before, after = getattr(old, name), getattr(new, name)
        if before != after:
            wrong[name] = f"reshaped    {name}: {before}, not {after}"
    if wrong and not partial:
        raise UserError(
            f"The weights in {where} are a {card.model} with other options than the model to train:"
            f"{_table(wrong)}\nRemove --model and its options to use those of the weights. {_PARTIAL}"
        )
    state = {name: value for name, value in state.items() if name not in wrong}
    lines = broken | {name: line for name, line in wrong.items() if name not in broken}
    if all(_HEADS.fullmatch(name) for name in state):
        raise UserError(f"Nothing in {where} fits the model:{_table(lines)}")
    if lines:
        notes.append(
            f"only part of it fits:{_table(lines)}\n"
            "Missing tensors are initialised; unexpected and reshaped ones are skipped"
        )
    return state, notes


def _on_meta(config: ModelConfig) -> Model:
    with torch.device("meta"):
        return build(config)


def _fit_channels(filters: Tensor, channels: int) -> Tensor:
    """First-layer filters for another number of channels, with the same response to grey images."""
    mean = filters.mean(dim=1, keepdim=True)
    return mean.repeat(1, channels, 1, 1) * (filters.shape[1] / channels)


def _mismatch(given: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, str]:
    """The differences of two state dicts in names and shapes: one line per tensor."""
    missing = {name: f"missing     {name} {tuple(wanted[name].shape)}" for name in wanted if name not in given}
    unexpected = {name: f"unexpected  {name} {tuple(given[name].shape)}" for name in given if name not in wanted}
    reshaped = {
        name: f"reshaped    {name} {tuple(given[name].shape)}, not {tuple(wanted[name].shape)}"
        for name in wanted
        if name in given and given[name].shape != wanted[name].shape
    }
    return missing | unexpected | reshaped


def _table(lines: Mapping[str, str], most: int = 12) -> str:
    more = [f"and {len(lines) - most} more"] if len(lines) > most else []
    return "".join(f"\n  {line}" for line in [*lines.values()][:most] + more)
