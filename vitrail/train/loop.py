"""The training loop: `steps` takes optimiser steps, `train` drives them, validates, saves and logs.

A run is a pure function of its configuration. Every batch, augmentation and dropout mask is drawn from (seed, step), so
a run resumed from any checkpoint ends with exactly the weights it would have had.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from vitrail.config import TrainConfig
from vitrail.data import Data
from vitrail.data.identity import identity
from vitrail.data.loader import TrainBatches
from vitrail.evaluate.stream import run_model
from vitrail.models import Model
from vitrail.runs.run import Run
from vitrail.tasks.objective import Objective
from vitrail.tasks.scores import NotFinite
from vitrail.train.batch import make_batch
from vitrail.train.checkpoint import Checkpoints, checkpoint_path, resume
from vitrail.train.custom import NOTHING, Custom
from vitrail.train.distill import introduce_teacher
from vitrail.train.divergence import Diverged
from vitrail.train.head import fit_head
from vitrail.train.interruption import Interruption
from vitrail.train.journal import Silence
from vitrail.train.optim import set_lr
from vitrail.train.prepare import make_card, open_splits
from vitrail.train.progress import Progress
from vitrail.train.schedule import Schedule
from vitrail.train.seeds import derive
from vitrail.train.setup import autocast, set_up
from vitrail.train.transfer import set_mode
from vitrail.train.watch import Watch
from vitrail.weights import save
from vitrail.weights.added import save_added
from vitrail.world import World


def steps(
    objective: Objective,
    optimizers: list[Optimizer],
    scaler: torch.amp.GradScaler,
    loader: TrainBatches,
    classes: int,
    config: TrainConfig,
    lr: Callable[[Progress], float],
    progress: Progress,
    world: World,
) -> Iterator[dict[str, float]]:
    """Takes optimiser steps indefinitely, from `progress` on; yields each step's loss and other values.

    `lr` gives the learning rate of the next step. Nothing is written to disk.
    """
    device, seed, optim, model = config.run.device, config.run.seed, config.optim, objective.model
    accumulate, normalise, precision = optim.grad_accum, loader.normalise, autocast(config)
    placed = loader.task is not None
    per_epoch, forward = len(loader) // accumulate, world.wrap(objective)
    learnt = [p for module in (model, *objective.added().values()) for p in module.parameters()]
    while True:
        epoch, first = divmod(progress.step, per_epoch)
        numbers = [world.share(batch) for batch in loader.numbers(epoch, first * accumulate)]
        batches = zip(loader.read(epoch, numbers), map(torch.from_numpy, numbers), strict=True)
        set_mode(model)
        for step in range(progress.step, (epoch + 1) * per_epoch):
            progress.tick()
            progress.lr = lr(progress)
            set_lr(optimizers, progress.lr)
            torch.manual_seed(derive(seed, step, 0))  # dropout and stochastic depth
            generator = torch.Generator().manual_seed(derive(seed, step, 1))  # augmentation
            values: dict[str, float] = {}
            for k in range(accumulate):
                with progress.waiting():
                    (pixels, labels), which = next(batches)
                pixels, labels = pixels.to(device), labels.to(device)
                batch = make_batch(pixels, labels, which, config, normalise, classes, generator, placed)
                with world.accumulating(forward, last=k + 1 == accumulate):
                    with precision():
                        result = forward(batch)
                    scaler.scale(result["loss"] / accumulate).backward()
                values = {name: values.get(name, 0.0) + value.item() / accumulate for name, value in result.items()}
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            norm = world.whole(clip_grad_norm_(learnt, optim.clip_grad or math.inf)).item()
            values = world.mean(values)
            if not math.isfinite(values["loss"]) or not (math.isfinite(norm) or scaler.is_enabled()):
                raise Diverged(step, progress.lr, values["loss"], norm)
            for optimizer in optimizers:
                scaler.step(optimizer)
                optimizer.zero_grad(set_to_none=True)
            scaler.update()
            objective.after_step(step)
            progress.add(values)
            yield values


def train(
    run: Path,
    config: TrainConfig,
    data: Data,
    model: Model,
    journal: Silence,
    interruption: Interruption,
    checkpoints: Checkpoints,
    world: World,
    custom: Custom = NOTHING,
    data_changed: bool = False,
) -> None:
    """Trains the model of a run to the end, from its last checkpoint if there is one.

    `data_changed` allows data that is not what the run began with.
    """
    # Data
    val, loader = world.in_turn(lambda: open_splits(config, data, custom))
    schedule, version = Schedule.of(config, data, len(loader), custom), identity(data)

    # Objective and optimisers
    progress, targets = Progress(), data.splits["train"].targets
    card = make_card(config, data, model)
    if not checkpoint_path(run).exists():
        fit_head(model, card, config, loader.split, progress)
    objective, optimizers, scaler = set_up(model, card, config, targets, progress, world, custom)

    # Resume
    parts = {**objective.parts(), "scaler": scaler, "progress": progress}
    parts |= {f"optimizer {i}": optimizer for i, optimizer in enumerate(optimizers)}
    if parts["kept"] is model:  # without a moving average
        del parts["kept"]
    resume(run, config.run.device, parts, progress, version, data_changed)
    with autocast(config)():
        card = introduce_teacher(objective, card, config, val, loader.split, progress, schedule.over(progress))

    def checkpoint() -> None:
        checkpoints.save({"data": version} | {name: part.state_dict() for name, part in parts.items()})

    # Loop
    watch = Watch(Run(run), config, card, val)
    how: dict[str, Any] = {"workers": config.source.workers, "device": config.run.device, "title": "validating"}
    walk = steps(objective, optimizers, scaler, loader, len(data.classes), config, schedule.lr, progress, world)
    while True:
        over = schedule.over(progress) or schedule.stalled(progress)
        if progress.count and (over or progress.step % schedule.per_epoch == 0):
            checkpoints.wait()  # files of the epoch follow it
            kept = (whole := world.unsharded(objective)).kept()
            meter = card.task.bound(kept).meter()
            try:
                run_model(kept, val, card.preprocess, [meter], compute=partial(whole.examine, kept), **how)
            except NotFinite:
                raise Diverged(progress.step - 1, progress.lr, progress.mean("loss"), math.nan) from None
            scores = meter.scores()
            progress.close_epoch(scores, watch(whole, kept, scores, progress, over), config.stop.best)
            (over,) = world.agree(custom.stops(progress) or over or schedule.stalled(progress))
            if world.first():
                if progress.kept == len(progress.rows):
                    save(Run(run).weights_file, kept, card.measured(scores, progress.kept))
                    save_added(Run(run).decoder_file, whole.added())
                journal.epoch(progress, schedule, card.task, over)
            checkpoint()
        if over:
            return

        values = next(walk)
        journal.step(progress, schedule)
        stop, due = world.agree(interruption.requested, progress.minutes_unsaved() >= config.run.save_minutes)
        if stop or due:
            if any(world.agree(not all(world.local(p).isfinite().all() for p in model.parameters()))):
                raise Diverged(progress.step - 1, progress.lr, values["loss"], math.nan)
            checkpoint()
        if stop:
            checkpoints.wait()
            raise KeyboardInterrupt
