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

import torch
from safetensors.torch import save as to_bytes
from torch import Tensor

from vitrail.config import Size, coerce
from vitrail.device import choose_device
from vitrail.errors import UserError
from vitrail.files import atomic_write, reading
from vitrail.models import FAMILIES, Model, ModelConfig, backbone, build, canonical, family, name_of, resized_state
from vitrail.models.dense import BACKBONE, Dense, DenseConfig
from vitrail.models.image_tower import TOWER, ImageTowerConfig
from vitrail.models.position import Interpolation
from vitrail.models.two_tower import TwoTower, TwoTowerConfig
from vitrail.models.vit import ViTConfig
from vitrail.progress import log, log_to_console
from vitrail.tasks import Multiclass, Pairs, Task, task_type
from vitrail.tokenizers import Tokenizer
from vitrail.weights import recognise
from vitrail.weights.card import Card, read_card, write_card
from vitrail.weights.formats import vit
from vitrail.weights.mismatch import mismatch, table
from vitrail.weights.sharded import is_index
from vitrail.weights.sources import Source, open_source
from vitrail.weights.tensors import as_float

# A distilled DeiT has a second head, on its distillation token; some families nest the layer in a head module.
_HEADS = re.compile(r"head(_dist)?(\.fc)?\.(weight|bias)")
_DENSE_HEADS = re.compile(r"head\..*")  # beside a backbone
_HIDDEN = re.compile(r"(head\.)?pre_logits\..*")  # the hidden layer of the head

_NAMELESS = "vit_w"  # the prefix of model names that encode an unlisted size
_NO_HEAD = "left out the head"
_PARTIAL = "Load the tensors that fit with --partial, in Python partial=True."


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
    if classes is not None and isinstance(opened.card.config, ImageTowerConfig):
        opened = _part(opened, TOWER)
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
    card = dataclasses.replace(card, task=card.task.bound(whole))
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
    opened = _open(source, like=backbone(model.config))
    if isinstance(model, Dense) and not isinstance(opened.card.config, DenseConfig):
        notes = _start_from(opened, model.backbone, Multiclass(()), resample, partial)
        return [*(note for note in notes if note != _NO_HEAD), f"new head for {len(task.classes)} {task.many}"]
    if isinstance(opened.card.config, DenseConfig) and not isinstance(model, Dense):
        opened = _part(opened, BACKBONE)
    if isinstance(model, TwoTower) and not isinstance(opened.card.config, TwoTowerConfig):
        notes = _start_from(opened, model.image, Multiclass(()), resample, partial)
        return [*(note for note in notes if note != _NO_HEAD), "new text tower and projections"]
    if isinstance(opened.card.config, ImageTowerConfig) and not isinstance(model, TwoTower):
        return [*_start_from(_part(opened, TOWER), model, task, resample, partial), "left out the text tower"]
    words = opened.card.task.to_json().get("tokenizer")
    if words != task.to_json().get("tokenizer"):
        raise UserError(
            f"The text tower in {opened.where} reads captions with another tokenizer. Use --tokenizer "
            f"{words['kind'] if words else 'clip'}; a learnt vocabulary (bpe) cannot be fine-tuned on other captions."
        )
    return _start_from(opened, model, task, resample, partial)


def _start_from(opened: _Opened, model: Model, task: Task, resample: Interpolation | None, partial: bool) -> list[str]:
    """`start_from` for weights of the same kind of model."""
    wanted = dataclasses.replace(opened.card, config=model.config, task=task)
    state, notes = _adapt(opened, wanted, model, resample, partial)
    model.load_state_dict(state, strict=not partial)
    return notes


def _part(opened: _Opened, prefix: str) -> _Opened:
    """The backbone of a model with a dense head or a text tower, as weights without a head."""
    body, weights = backbone(opened.card.config), opened.weights

    def read(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        state = weights.spec.read(tensors)
        return {n.removeprefix(prefix): value for n, value in state.items() if n.startswith(prefix)}

    part = dataclasses.replace(weights, family=family(body), spec=dataclasses.replace(weights.spec, read=read))
    card = dataclasses.replace(opened.card, config=body, task=Multiclass(()))
    return dataclasses.replace(opened, card=card, weights=part)


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
    task = _plain_task(weights, config, classes)
    card = Card(model=name_of(config), config=config, task=task, preprocess=preprocess)
    notes = [f"{weights.format} weights of a {card.model} at {config.img_size[0]}x{config.img_size[1]}"]
    if isinstance(config, ViTConfig):
        notes += vit.conversion_notes(shapes, config)
    eps = weights.spec.eps
    if sidecar.eps not in (None, eps) and "eps" not in {f.name for f in dataclasses.fields(backbone(config))}:
        notes.append(f"LayerNorm's epsilon is {eps:g} for {weights.kind}, not {sidecar.eps:g}")
    if isinstance(config, TwoTowerConfig) and task.to_json()["tokenizer"]["kind"] == "unknown":
        notes.append(f"the tokenizer of {config.text.vocab:,} tokens is not known, so it reads token ids, but no words")
    if len(tensors.wrapped) > 1:
        notes.append(f"loaded '{tensors.wrapped[0]}', not {', '.join(map(repr, tensors.wrapped[1:]))}")
    return _Opened(where, card, weights, False, (*notes, assumed) if assumed else tuple(notes))


def _plain_task(weights: recognise.Weights, config: ModelConfig, classes: tuple[str, ...]) -> Task:
    """The task of weights without a card; a vocabulary of CLIP's size is CLIP's."""
    if isinstance(config, TwoTowerConfig):
        known = config.text.vocab == Tokenizer("clip").vocab
        return Pairs((), Tokenizer("clip" if known else "unknown"), config.text.length, config.classes)
    return task_type(weights.spec.task)(classes)


def _own_card(path: Path) -> Card:
    """The card in a file, with its architecture validated."""
    card = read_card(path)
    with reading(path, "a vitrail model card"):
        try:
            _ = card.config
        except UserError as error:
            raise UserError(f"{path}: {error}") from error
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
            task = type(card.task)(names) if card.task.annotated else Multiclass(names)
            card = dataclasses.replace(card, task=task, metrics={})
    config, preprocess = card.config, card.preprocess
    size = config.img_size if img_size is None else coerce(type(config), "img_size", img_size)
    channels = config.channels if channels is None else coerce(type(config), "channels", channels)
    config = dataclasses.replace(config, classes=card.outputs, img_size=size, channels=channels)
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

    unneeded, words = ([], "") if isinstance(new, TwoTowerConfig) else recognise.pretraining_only(state)
    dense = isinstance(new, DenseConfig)
    heads_of = _DENSE_HEADS if dense else _HEADS
    fresh = not card.task.matches(wanted.task)  # then the old head is not needed
    fresh = fresh or (isinstance(old, DenseConfig) and isinstance(new, DenseConfig) and old.head != new.head)
    if fresh and wanted.classes:
        new_ones, old_ones = wanted.task.many, card.task.many
        things = new_ones if new_ones == old_ones or not card.classes else f"{new_ones} instead of {old_ones}"
        notes.append(f"new head for {len(wanted.classes)} {things}")
    elif fresh and card.classes:
        notes.append(_NO_HEAD)
    elif not wanted.classes and (hidden := [name for name in state if _HIDDEN.fullmatch(name)]):
        unneeded += hidden
        notes.append("left out the hidden layer before the head")
    if words and wanted.task.labelled:  # else `added` says what becomes of it
        notes.append(f"left out {words}, which only pre-training needs")
    behind = [heads_of] if wanted.classes else [heads_of, _HIDDEN]
    leave = (*unneeded, *(name for name in state if fresh and any(part.fullmatch(name) for part in behind)))
    state = {name: value for name, value in state.items() if name not in leave}
    body = _on_meta(dataclasses.replace(old, classes=new.classes) if fresh else old)
    expected = body.state_dict()
    hidden = [name for name in expected if _HIDDEN.fullmatch(name) and not old.classes and name not in state]
    if fresh:
        expected = {n: value for n, value in expected.items() if n not in hidden and not heads_of.fullmatch(n)}
    broken = mismatch(state, expected)
    if broken and not partial:
        no = f"does not fit the architecture in its {Path(where).stem}.json"
        no = no if opened.own else f"does not match a {card.model}"
        raise UserError(f"{where} {no}:{table(broken)}\n{_PARTIAL}")
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
    if fresh and dense:
        state |= {name: value for name, value in model.state_dict().items() if heads_of.fullmatch(name)}
    elif fresh:
        heads = {name: value for name, value in model.named_parameters() if _HEADS.fullmatch(name)}
        state |= {name: torch.zeros(value.shape) for name, value in heads.items()}
        if hidden:  # initialised with the head
            start = build(new).state_dict()
            state |= {name: start[name] for name in hidden}
    wrong = mismatch(state, model.state_dict())
    for name in [f.name for f in dataclasses.fields(old) if f.name in recognise.NOT_IN_TENSORS]:
        before, after = getattr(old, name), getattr(new, name)
        if before != after:
            wrong[name] = f"reshaped    {name}: {before}, not {after}"
    if wrong and not partial:
        raise UserError(
            f"The weights in {where} are a {card.model} with other options than the model to train:"
            f"{table(wrong)}\nRemove --model and options such as --stem to use those of the weights. {_PARTIAL}"
        )
    state = {name: value for name, value in state.items() if name not in wrong}
    lines = broken | {name: line for name, line in wrong.items() if name not in broken}
    if all(heads_of.fullmatch(name) for name in state):
        raise UserError(f"Nothing in {where} fits the model:{table(lines)}")
    if lines:
        notes.append(
            f"only part of it fits:{table(lines)}\n"
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
