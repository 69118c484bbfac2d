"""From a resolved configuration to the model, its card and the splits."""

from __future__ import annotations

import math
from functools import partial

import torch

from vitrail.config import ArchConfig, TrainConfig, options
from vitrail.data import Data
from vitrail.data.cache import once
from vitrail.data.dataset import Split
from vitrail.data.loader import TrainBatches
from vitrail.data.pixels import WHITE
from vitrail.data.preprocess import Preprocess
from vitrail.device import hardware, memory
from vitrail.errors import UserError
from vitrail.models import Model, ModelConfig, build, canonical, parameters
from vitrail.models.module import start_from_module
from vitrail.tasks import Task
from vitrail.train.batch import read_size
from vitrail.train.custom import NOTHING, Custom
from vitrail.train.teacher import meet
from vitrail.train.transfer import set_learning
from vitrail.train.watch import open_probe
from vitrail.weights import Card, open_card, start_from
from vitrail.weights.added import left_out
from vitrail.weights.card import versions
from vitrail.world import world


def model_config(config: TrainConfig, task: Task) -> ModelConfig:
    """The architecture of a resolved configuration."""
    base = open_card(config.weights, config.model).config if config.weights else canonical(config.model)[1]
    arch = {name: value for name in options(ArchConfig) if (value := getattr(config.arch, name)) is not None}
    given = {"img_size": config.input.img_size, "channels": config.input.channels} | arch
    contrast = {"loss": config.optim.loss} if task.several else {}
    return task.architecture(base, given | contrast)


def preprocessing(config: TrainConfig) -> Preprocess:
    """The preprocessing of a resolved configuration."""
    seen = config.input
    size = seen.img_size, seen.channels, seen.crop
    return Preprocess(*size, seen.mean, seen.std, seen.bits, seen.interpolation, seen.fit)


def prepare(config: TrainConfig, data: Data, custom: Custom = NOTHING) -> tuple[Model, list[str]]:
    """The initial model, with fresh or trained weights, and a note on each adaptation of the weights.

    Raises UserError for a configuration that cannot be trained on this data.
    """
    _check_memory(parameters(model_config(config, data.task)))
    torch.manual_seed(config.run.seed)
    model = build(model_config(config, data.task))
    notes = start_from_module(model, custom.model)
    if config.weights is not None:
        how = config.transfer
        notes += start_from(config.weights, model, data.task, resample=how.pos_resample, partial=how.partial)
        notes += left_out(config.weights) if data.task.labelled else []
        notes = [f"From {config.weights}: {note}." for note in notes]
        set_learning(model, how)
    if config.optim.loss == "bce" and config.weights is None:
        for head in model.classifiers():
            assert head.bias is not None
            # Start the bias at the log prior, -log K, which the first steps would otherwise have to learn.
            torch.nn.init.constant_(head.bias, -math.log(len(data.classes)))
    data.task.check_model(model, config)
    if not data.task.labelled:
        _check_added(config, data)
    open_probe(config)
    if config.distillation.teacher is not None:
        meet(config.distillation, data.task, preprocessing(config))
    _check_share(min(config.optim.batch_size, len(data.splits["train"])), config.optim.grad_accum)
    return model, notes


def _check_share(images: int, passes: int) -> None:
    """Raises UserError for a batch of so many images that processes cannot share equally, in so many passes."""
    size, split = world().size, f" in each of its {passes} forward passes" if passes > 1 else ""
    if images < passes:
        raise UserError(f"A batch has {images} images, too few for {passes} forward passes. Lower --grad-accum.")
    if images // passes % size:
        parts = size * passes
        less, more = images // parts * parts, (images // parts + 1) * parts
        raise UserError(
            f"Each of the {size} processes gets the same share of a batch{split}, but a batch has {images} images. Use "
            f"{f'--batch-size {less} or {more}' if less else f'at least {parts} images'}."
        )


def _check_added(config: TrainConfig, data: Data) -> None:
    """Raises UserError for a decoder or head that exceeds the memory, before it is built."""
    with torch.device("meta"):
        model = build(model_config(config, data.task))
        objective = data.task.objective(model, config, data.splits["train"].targets)
    modules = (model, *objective.added().values(), *objective.followers().values())
    weights = sum(p.numel() for module in modules for p in module.parameters())
    _check_memory(weights, f"with its {' and '.join(objective.added())} ", "or the sizes of what the method adds")


def _check_memory(weights: int, what: str = "", more: str = "or --img-size") -> None:
    """Raises UserError for a model whose weights alone exceed the memory; `what` is counted with it."""
    needed, available = 4 * weights, memory()
    if available is not None and needed > available:
        raise UserError(
            f"The model {what}has {weights:,} parameters, {needed / 2**30:,.0f} GiB, but there are "
            f"{available / 2**30:,.0f} GiB of memory. Lower its width or depth, {more}."
        )


def make_card(config: TrainConfig, data: Data, model: Model) -> Card:
    """The card of the model that a run trains."""
    return Card(
        model=config.model,
        config=model.config,
        task=data.task.fitted(data.splits["train"].targets).bound(model),
        preprocess=preprocessing(config),
        versions=versions() | {"hardware": hardware(config.run.device)},
    )


def open_splits(config: TrainConfig, data: Data, custom: Custom = NOTHING) -> tuple[Split, TrainBatches]:
    """The validation split and the training batches of a run, from the image cache where there is one."""
    change = partial(custom.augmented, white=WHITE[config.input.bits]) if custom.augment is not None else None
    preprocess, source, crop_scale = preprocessing(config), config.source, config.augment.crop_scale
    splits = data.read_as(preprocess.channels, preprocess.bits).splits
    val = once(splits["val"], preprocess, False, source.cache_gb, source.workers)
    seen = read_size(config, data, preprocess)
    train = once(splits["train"], seen, crop_scale < 1, source.cache_gb, source.workers)
    batches = TrainBatches(
        train,
        seen,
        min(config.optim.batch_size, len(train)) // config.optim.grad_accum,
        config.run.seed,
        crop_scale,
        source.workers,
        source.balanced_sampling,
        config.augment.aug_repeats,
        change,
        data.task if data.task.annotated else None,
        config.augment.hflip,
    )
    return val, batches
