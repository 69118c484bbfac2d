"""The summary that a run logs first: data, model, recipe and device, and a warning about class imbalance."""

from __future__ import annotations

from dataclasses import fields

from vitrail.config import TrainConfig
from vitrail.data import Data
from vitrail.data.balance import imbalance
from vitrail.models import Model, parameters
from vitrail.train.transfer import describe_learning


def describe(config: TrainConfig, data: Data, model: Model) -> str:
    """The data, pixels, model, recipe and device of a run, a line each."""
    counts = ", ".join(f"{len(split):,} {name}" for name, split in data.splits.items())
    c, o = config.input, config.optim
    mean, std = (", ".join(f"{value:g}" for value in values) for values in (c.mean, c.std))
    length = f"{o.epochs:g} epochs" if o.time_budget is None else f"{o.time_budget}, about {o.epochs:g} epochs"
    arch = config.arch
    has_choice = {"stem", "pool", "pos"} <= {option.name for option in fields(model.config)}
    chosen = f", {arch.stem} stem, {arch.pool} pooling, {arch.pos} positions" if has_choice else ""
    lines = [
        f"data      {config.data}: {counts}; {data.task}",
        f"pixels    {c.channels} {'channel' if c.channels == 1 else 'channels'} of {c.bits} bits; "
        f"mean {mean}, std {std} ({c.normalize})",
        f"model     {config.model} at {c.img_size[0]}x{c.img_size[1]}x{c.channels}{chosen}: "
        f"{model.config.length} tokens, {parameters(model.config):,} parameters",
        f"recipe    {config.recipe}: {length}, batch {o.batch_size * o.grad_accum_steps}, {o.opt}, "
        f"lr {o.lr:g} {o.sched} with {o.warmup_epochs:g} epochs of warm-up, weight decay {o.weight_decay:g}",
        *([f"weights   {config.weights}: {describe_learning(model, config)}"] if config.weights else []),
        f"device    {config.run.device}, precision {config.run.amp}, seed {config.run.seed}",
    ]
    return "\n".join(lines)


def uneven(config: TrainConfig, data: Data) -> str | None:
    """A warning if classes are imbalanced and nothing compensates for it."""
    counts = data.task.counts(data.splits["train"].targets)
    if counts is None or config.source.class_weights or config.source.balanced_sampling:
        return None
    found = imbalance(dict(zip(data.classes, counts.tolist(), strict=True)))
    return None if found is None else f"{found}: try {data.task.remedy}."
