"""The summaries that a run logs: first its data, model, recipe and device; last which epoch it kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from vitrail.config import TrainConfig
from vitrail.config.synonyms import PRETRAINED
from vitrail.data import Data
from vitrail.data.balance import imbalance
from vitrail.models import Model, parameters
from vitrail.runs.run import Row
from vitrail.train.transfer import describe_learning
from vitrail.weights import Card
from vitrail.world import world

PHOTOGRAPH = 64  # pixels of the shorter side, of colour images


def describe(config: TrainConfig, data: Data, model: Model) -> str:
    """The data, pixels, model, recipe and device of a run, a line each."""
    counts = ", ".join(f"{len(split):,} {name}" for name, split in data.splits.items())
    c, o = config.input, config.optim
    mean, std = (", ".join(f"{value:g}" for value in values) for values in (c.mean, c.std))
    length = _epochs(o.epochs) if o.time_budget is None else f"{o.time_budget}, about {_epochs(o.epochs)}"
    arch, precision = config.arch, "fp32" if config.run.amp == "off" else config.run.amp
    has_choice = {"stem", "pool", "pos"} <= {option.name for option in fields(model.config)}
    positions = "no" if arch.pos == "none" else arch.pos
    chosen = f", {arch.stem} stem, {arch.pool} pooling, {positions} positions" if has_choice else ""
    chosen += f", {arch.attention} attention" if arch.attention not in (None, "global") else ""
    tokens = f"{model.config.length} tokens, " if model.config.length > 1 else ""
    own = config.python or ()
    opt = "your optimizer" if "optimizer" in own else o.opt
    sched = "by your schedule" if "schedule" in own else f"{o.sched} with {_epochs(o.warmup_epochs)} of warm-up"
    learning = describe_learning(model, config, data.task.labelled) if config.weights else ""
    lines = [
        f"data      {config.data}: {counts}; {data.task}",
        f"pixels    {c.channels} {'channel' if c.channels == 1 else 'channels'} of {c.bits} bits; "
        f"mean {mean}, std {std} ({c.normalize})",
        f"model     {config.model} at {c.img_size[0]}x{c.img_size[1]}x{c.channels}{chosen}: "
        f"{tokens}{parameters(model.config):,} parameters",
        f"recipe    {config.recipe}: {length}, batch {o.batch_size}, {opt}, "
        f"lr {o.lr:g} {sched}, weight decay {o.weight_decay:g}",
        *([f"weights   {config.weights}: {learning}"] if config.weights else []),
        f"device    {config.run.device}{_processes(config)}, precision {precision}, seed {config.run.seed}",
    ]
    return "\n".join(lines)


def _epochs(number: float) -> str:
    return f"{number:g} {'epoch' if number == 1 else 'epochs'}"


def _processes(config: TrainConfig) -> str:
    if world().size == 1:
        return ""
    shard = config.run.shard
    return f" in each of {world().size} processes ({'DDP' if shard == 'off' else f'FSDP2, --shard {shard}'})"


def pretrained_flags(config: TrainConfig, data: Data) -> str | None:
    """The flags that start from pre-trained weights, for photographs that a run learns from scratch."""
    photographs = data.channels == 3 and data.bits == 8 and min(data.size) >= PHOTOGRAPH and data.task.labelled
    if config.weights is not None or config.distillation.teacher is not None or not photographs:
        return None
    size = "" if min(data.size) >= 192 else f" --img-size {round(min(data.size) / 16) * 16}"
    return f"--weights {PRETRAINED}{size}"


def uneven(config: TrainConfig, data: Data) -> str | None:
    """A warning if classes are imbalanced and nothing compensates for it."""
    counts = data.task.counts(data.splits["train"].targets)
    if counts is None or config.source.class_weights or config.source.balanced_sampling:
        return None
    found = imbalance(dict(zip(data.classes, counts.tolist(), strict=True)))
    return None if found is None else f"{found}: try {data.task.remedy}."


def kept_epoch(card: Card, rows: Sequence[Row], best_by: str | None = None) -> str:
    """Which epoch's model a run kept, and why: "epoch 30 of 30: top-1 97.8%, within one standard error of …".

    No score without labels tells which epoch is the best, so self-supervision keeps the last.
    """
    main, kept = card.task.chosen(best_by), int(card.metrics["epoch"])
    if not card.task.labelled:
        return f"epoch {kept}, the last"
    scores = {int(row["epoch"]): row[f"val_{main.name}"] for row in rows}
    best = main.best(list(scores.values()))
    first = next(epoch for epoch, score in scores.items() if score == best)
    why = f"within one standard error of the best ({main.text(best)}, epoch {first})"
    return f"epoch {kept} of {len(rows)}: {main.title} {main.text(scores[kept])}, " + (
        "the best" if scores[kept] == best else why
    )
