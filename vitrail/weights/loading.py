"""Opens trained models: runs, weights files of any supported format, names of a hub, state dicts.

vitrail's own weights have a model card next to them. For others a card is made from their tensors and the files next
to them (`recognise.py`). Nothing here ever unpickles code.
"""

from __future__ import annotations

import dataclasses
import json
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
from vitrail.errors import UserError, shortlist
from vitrail.files import atomic_write, write_text
from vitrail.models import FAMILIES, Model, ModelConfig, build, canonical, family, name_of, resized_state
from vitrail.models.position import Interpolation
from vitrail.models.vit import ViTConfig
from vitrail.progress import log, log_to_console
from vitrail.tasks import Multiclass, Task
from vitrail.weights import hub, recognise
from vitrail.weights.card import WEIGHTS_FILE, Card, read_card
from vitrail.weights.formats import vit
from vitrail.weights.sharded import INDEXES, is_index, open_sharded
from vitrail.weights.tensors import SUFFIXES, as_float, from_state_dict, open_tensors

_IN_FOLDERS = (WEIGHTS_FILE, INDEXES[0], "pytorch_model.bin", INDEXES[1])  # what is taken first comes first

# Distilled DeiT has a second head, on its distillation token; some families keep the layer in a module with others.
_HEADS = re.compile(r"head(_dist)?(\.fc)?\.(weight|bias)")
_HIDDEN = re.compile(r"(head\.)?pre_logits\..*")  # the hidden layer before it, which goes with it

_NAMELESS = "vit_w"  # how cards call models of a size that has no name
_PARTIAL = "Take what fits with partial=True, or --partial of train and convert."

Source = str | Path | Mapping[str, Any]  # a run, a file, a name of the hub, or a state dict in memory


def save(path: Path, model: Model, card: Card) -> None:
    """Writes the tensors to `path` (a `.safetensors` file) and the card beside them."""
    write_text(path.with_suffix(".json"), json.dumps(card.to_json(), indent=2, ensure_ascii=False) + "\n")
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
    resample: Interpolation = "bicubic",
    partial: bool = False,
    headless: bool = False,
) -> tuple[Model, Card]:
    """The model of a run or of anybody's weights, ready to predict, and its card. The rest is that of `load`.

    Weights without a head are a UserError, unless `headless` says that their features will do.
    """
    opened = _open(source, expected=model)
    choose_device(device)
    card = _wanted(opened, classes, img_size, channels)
    if not card.classes and not headless:
        raise UserError(f"{opened.where} has no classification head. Ask for a new one: classes=N, or --classes N.")
    whole = _on_meta(card.config)
    state, notes = _adapt(opened, card, whole, resample, partial)
    if partial and (missing := whole.state_dict().keys() - state.keys()):
        fresh = build(card.config).state_dict()
        state |= {name: fresh[name] for name in missing}
    if notes:
        log_to_console()
        for note in notes:
            log.info(f"From {opened.where}: {note}.")
    lent = isinstance(source, Mapping)  # tensors of another model, which must not change with this one
    seen: set[int] = set()
    for name, value in state.items():
        shared = value.data_ptr() in seen  # two names for one tensor, each of which is to be learnt by itself
        seen.add(value.data_ptr())
        state[name] = value.to(device, copy=lent or shared)
    whole.load_state_dict(state, assign=True)
    return whole.eval(), card


def load(
    source: Source,
    model: str | ModelConfig | None = None,
    classes: int | Sequence[str] | None = None,
    img_size: int | Size | None = None,
    channels: int | None = None,
    *,
    resample: Interpolation = "bicubic",
    partial: bool = False,
    device: str = "cpu",
) -> Model:
    """A trained model, ready to predict: `vitrail.load("runs/demo")`, `vitrail.load("ViT-B_16.npz", classes=10)`.

    `source` is a run, a weights file of vitrail, timm, Hugging Face, torchvision or JAX, `timm:NAME`, `hf:REPO`, or a
    state dict. `model` tells what its tensors do not show. Other classes get a new head, `classes=0` none, another size
    resampled positions (bicubic, bilinear, or linear as in the paper), other channels folded or tiled filters; whatever
    is adapted is logged, and all else must fit. With `partial`, what does not is left out, and what is missing is
    fresh. Weights without a head are a model without a head, which gives features.
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
    """The weights file that a run folder, a path or a name of the hub stands for."""
    if hub.is_hub(str(source)):
        return hub.fetch(str(source))
    path = Path(source)
    try:
        if path.is_dir():
            path = next((path / name for name in _IN_FOLDERS if (path / name).exists()), path / WEIGHTS_FILE)
            if not path.exists() and (path.parent / CONFIG_FILE).exists():
                raise UserError(
                    f"The run {path.parent} has no {WEIGHTS_FILE} yet: its first epoch is not finished. "
                    f"Continue it with `vitrail train --resume {path.parent}`."
                )
        if not path.exists():
            raise UserError(f"{source} is neither a run folder nor a weights file: {path} does not exist.")
    except OSError as error:  # a folder that may not be entered, a name that is too long
        raise UserError(f"{str(source)[:80]} cannot be opened: {error.strerror}.") from error
    if path.suffix not in SUFFIXES and not is_index(path):
        raise UserError(f"Weights are read from run folders and {', '.join(SUFFIXES)} files, but {path} is neither.")
    return path


def home(source: str | Path) -> Path:
    """The folder in which results of a model are kept: its own, or the current one for models of the hub."""
    return Path() if hub.is_hub(str(source)) else locate(source).parent


def absolute(source: str) -> str:
    """A source that is found from any folder."""
    return source if hub.is_hub(source) else str(Path(source).expanduser().resolve())


def start_from(
    source: Source,
    model: Model,
    task: Task,
    *,
    resample: Interpolation = "bicubic",
    partial: bool = False,
) -> list[str]:
    """Loads trained weights into a fresh model that may differ in size, channels and classes.

    Returns one sentence for everything that was adapted. Another body is a UserError, unless `partial` asks for
    whatever fits: nothing is left out silently.
    """
    opened = _open(source, like=model.config)
    wanted = dataclasses.replace(opened.card, config=model.config, task=task)
    state, notes = _adapt(opened, wanted, model, resample, partial)
    model.load_state_dict(state, strict=not partial)
    return notes


def open_card(source: str | Path, model: str | None = None) -> Card:
    """The card of a run or weights file, without reading a tensor. Without a head, no classes are named.

    `model` is the name of a model, or what a card calls one: it tells the numbers that nothing else does.
    """
    named = model is not None and not model.startswith(_NAMELESS) and model not in (*FAMILIES, "deit")
    config = canonical(model)[1] if model and named else None
    return _open(source, like=config).card


@dataclass(frozen=True)
class _Opened:
    """Weights that are known, but not yet read."""

    where: str
    card: Card
    weights: recognise.Weights
    own: bool  # has a card beside it
    notes: tuple[str, ...] = ()


def _open(source: Source, expected: str | ModelConfig | None = None, like: ModelConfig | None = None) -> _Opened:
    """What a source is: by its card, or by what its tensors and the files beside it show.

    Another architecture than the `expected` one is a UserError; `like` tells heads where nothing else does.
    """
    if isinstance(source, Mapping):
        where, path, tensors = "The state dict", None, from_state_dict(source, "The state dict")
    else:
        path = locate(source)
        where, tensors = str(path), open_sharded(path) if is_index(path) else open_tensors(path)
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
    if sidecar.eps not in (None, eps):
        notes.append(f"LayerNorm's epsilon is {eps:g} in every {weights.kind} here, not {sidecar.eps:g}")
    if len(tensors.wrapped) > 1:
        notes.append(f"taken from '{tensors.wrapped[0]}', not from {', '.join(map(repr, tensors.wrapped[1:]))}")
    return _Opened(where, card, weights, False, (*notes, assumed) if assumed else tuple(notes))


def _own_card(path: Path) -> Card:
    """The card in a file, with its architecture validated."""
    card = read_card(path)
    try:
        _ = card.config
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except TypeError as error:  # of a family that is no name
        raise UserError(f"{path} is not a model card of vitrail: {error!r}.") from error
    return card


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
    opened: _Opened, wanted: Card, model: Model, resample: Interpolation, partial: bool
) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors for a model that may differ in size, channels and classes, and a sentence on each change.

    Only if they may be a part of it, some of the model's tensors can be missing.
    """
    card, where = opened.card, opened.where
    old, new = card.config, wanted.config
    if family(old) != family(new):
        raise UserError(f"The weights in {where} are a {card.model}, but the model to train is a {name_of(new)}.")
    state = opened.weights.read(old)
    notes = list(opened.notes)

    unneeded = recognise.pretraining_only(state)
    fresh = not card.task.matches(wanted.task)  # then no old head is needed, nor looked for
    if fresh:
        new_ones, old_ones = wanted.task.many, card.task.many
        things = new_ones if new_ones == old_ones else f"{new_ones} instead of {old_ones}"
        notes.append(f"new head for {len(wanted.classes)} {things}" if wanted.classes else "left out the head")
    elif not wanted.classes:
        unneeded += [name for name in state if _HIDDEN.fullmatch(name)]
    if unneeded:
        notes.append(f"left out {shortlist(unneeded, 4)}")
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
        no = no if opened.own else f"is no {card.model} that vitrail can build"
        raise UserError(f"{where} {no}:{_table(broken)}\n{_PARTIAL}")
    state = {name: value for name, value in state.items() if name not in broken}
    floats = [name for name in state if expected[name].is_floating_point()]  # BatchNorm counts its batches
    other = sorted({str(state[name].dtype).removeprefix("torch.") for name in floats} - {"float32"})
    for name in floats:
        state[name] = as_float(name, state[name], where)  # one by one, so that what it replaces is freed
    if other:
        notes.append(f"{', '.join(other)} became float32")
    resized = resized_state(state, old, new, resample)
    if any(resized[name] is not state[name] for name in state):
        sizes = f"{old.grid[0]}x{old.grid[1]} to {new.grid[0]}x{new.grid[1]} patches"
        notes.append(f"positions resampled from {sizes} ({resample})")
    state = resized
    first = body.filters()
    if old.channels != new.channels and first in state:
        state[first] = _fit_channels(state[first], new.channels)
        notes.append(f"patch filters changed from {old.channels} to {new.channels} channels")
    if fresh:
        heads = {name: value for name, value in model.named_parameters() if _HEADS.fullmatch(name)}
        state |= {name: torch.zeros(value.shape) for name, value in heads.items()}
        if hidden:  # begins fresh as the head does
            start = build(new).state_dict()
            state |= {name: start[name] for name in hidden}
    wrong = _mismatch(state, model.state_dict())
    for name in [f.name for f in dataclasses.fields(old) if f.name in recognise.NOT_IN_TENSORS]:
        before, after = getattr(old, name), getattr(new, name)
        if before != after:
            wrong[name] = f"reshaped    {name}: {before}, not {after}"
    if wrong and not partial:
        raise UserError(
            f"The weights in {where} belong to a {card.model} with other settings than the model to train:"
            f"{_table(wrong)}\nLeave out --model and its options to take them from the weights. {_PARTIAL}"
        )
    state = {name: value for name, value in state.items() if name not in wrong}
    lines = broken | {name: line for name, line in wrong.items() if name not in broken}
    if all(_HEADS.fullmatch(name) for name in state):
        raise UserError(f"Nothing in {where} fits the model:{_table(lines)}")
    if lines:
        notes.append(
            f"only a part of it fits:{_table(lines)}\n"
            "What is missing begins fresh, what is unexpected or reshaped is left out"
        )
    return state, notes


def _on_meta(config: ModelConfig) -> Model:
    with torch.device("meta"):
        return build(config)


def _fit_channels(filters: Tensor, channels: int) -> Tensor:
    """First-layer filters for another number of channels that answer alike to the same grey picture."""
    mean = filters.mean(dim=1, keepdim=True)
    return mean.repeat(1, channels, 1, 1) * (filters.shape[1] / channels)


def _mismatch(given: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, str]:
    """How two state dicts differ in names and shapes: a line for every tensor that does."""
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
