"""Training, from top to bottom: set up, data, model and objective, optimiser, resume, loop.

A run is a pure function of its configuration. Every batch, augmentation and dropout mask is drawn from
(seed, step), so a run that goes on from any checkpoint ends with the very weights it would have had.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils import clip_grad_norm_

from vitrail.config import TrainConfig, coerce, flat
from vitrail.data import Data, full_name, open_data
from vitrail.data.augment import augment
from vitrail.data.cache import once
from vitrail.data.loader import TrainBatches
from vitrail.data.preprocess import Preprocess
from vitrail.errors import UserError, some
from vitrail.evaluate.metrics import measure
from vitrail.evaluate.verbs import evaluate_on, predict_split
from vitrail.models import Model, build
from vitrail.progress import log, speak
from vitrail.train.checkpoint import Stateful, load_checkpoint, restore_parts, save_checkpoint
from vitrail.train.journal import Journal
from vitrail.train.memory import keep_freed_memory, recompute_activations
from vitrail.train.objectives import Supervised
from vitrail.train.optim import Ema, build_optimizers, lr_at, set_lr
from vitrail.train.recipe import model_config, resolve
from vitrail.train.run import (
    Interruption,
    Progress,
    create_run,
    derive,
    describe,
    diverged,
    reopen,
    split_settings,
)
from vitrail.weights import WEIGHTS_FILE, Card, save, start_from


def train(source: str | None, resume: str | None, overwrite: bool, asked: dict[str, Any]) -> Path:
    """Trains and evaluates; `vitrail.train` is this with keywords."""
    speak()
    keep_freed_memory()
    asked = {name: coerce(TrainConfig, name, value) for name, value in asked.items()}
    if asked.get("weights") is not None:
        asked["weights"] = str(Path(asked["weights"]).expanduser().resolve())  # found from any folder
    if resume is not None:
        run, config = reopen(Path(resume), source, asked)
        data = open_data(config.data, **split_settings(flat(config)))
        model, notes = prepare(config, data)
    elif source is not None:
        data = open_data(source, **split_settings(asked))
        config = resolve(full_name(source), data, asked)
        model, notes = prepare(config, data)  # whatever can be refused is refused before there is a folder
        run = create_run(config, overwrite)
    else:
        raise UserError("There is nothing to train on: give a data set, or --resume RUN to go on with a run.")
    with Journal(run) as journal, Interruption(run) as interruption:
        for line in (describe(config, data, model.config), *notes):
            log.info(line)
        optimise(run, config, data, model, journal, interruption)
        metrics = evaluate_on(run, data, "val", device=config.run.device, workers=config.input.workers)
        log.info(metrics.table())
        if data.unreadable:
            names = [f"{file} ({reason})" for file, reason in data.unreadable]
            log.warning(f"{len(names)} images could not be read and were left out: {some(names, 10)}.")
        log.info(f"The run is in {run}. Next: vitrail predict {run} IMAGES")
    return run


def prepare(config: TrainConfig, data: Data) -> tuple[Model, list[str]]:
    """The model as training begins, fresh or from trained weights, and a sentence on each thing adapted in these."""
    torch.manual_seed(config.run.seed)
    model = build(model_config(config, len(data.classes)))
    notes = [] if config.weights is None else start_from(config.weights, model, data.classes)
    batches = max(len(data.splits["train"]) // config.optim.batch_size, 1)
    if batches < config.optim.grad_accum_steps:
        raise UserError(
            f"An epoch has {batches} batches, fewer than the {config.optim.grad_accum_steps} that one step "
            "accumulates. Lower --grad-accum-steps or --batch-size."
        )
    return model, [f"From {config.weights}: {note}." for note in notes]


def optimise(
    run: Path, config: TrainConfig, data: Data, model: Model, journal: Journal, interruption: Interruption
) -> None:
    """The loop itself, in a run folder that exists."""
    device, seed, optim = config.run.device, config.run.seed, config.optim
    accumulate, classes = optim.grad_accum_steps, len(data.classes)

    # Data
    preprocess = Preprocess(config.input.img_size, config.input.channels, config.input.crop)
    keep = config.input.cache_gb, config.input.workers
    val_split = once(data.splits["val"], preprocess, False, *keep)
    loader = TrainBatches(
        once(data.splits["train"], preprocess, config.augment.crop_scale < 1, *keep),
        preprocess,
        optim.batch_size,
        seed,
        config.augment.crop_scale,
        config.input.workers,
    )
    per_epoch = len(loader) // accumulate
    steps, warmup = per_epoch * optim.epochs, round(per_epoch * optim.warmup_epochs)

    # Model and objective
    model.to(device)
    ema = Ema(model, optim.model_ema) if optim.model_ema else None
    kept = ema.model if ema else model
    if config.run.grad_checkpointing:
        recompute_activations(model)
    if config.run.compile:
        model.compile()
    objective = Supervised(model)
    card = Card(model=config.model, config=model.config, classes=data.classes, preprocess=preprocess)

    # Optimiser
    optimizers = build_optimizers(model, optim, pretrained=config.weights is not None)
    scaler = torch.amp.GradScaler(device, enabled=config.run.amp == "fp16")
    precision = torch.bfloat16 if config.run.amp == "bf16" else torch.float16

    # Resume
    parts: dict[str, Stateful] = {"model": model, "kept": kept, "scaler": scaler}
    parts |= {f"optimizer {i}": optimizer for i, optimizer in enumerate(optimizers)}
    progress = Progress()
    if (state := load_checkpoint(run, device)) is not None:
        progress = Progress.restore(restore_parts(run, state, parts), data)
        log.info(f"Going on from step {progress.step} of {steps}.")

    def checkpoint() -> None:
        save_checkpoint(run, progress.state(data) | {name: part.state_dict() for name, part in parts.items()})

    # Loop
    while True:
        epoch, first = divmod(progress.step, per_epoch)
        if len(progress.rows) < epoch:
            logits, truth = predict_split(
                kept,
                val_split,
                preprocess,
                workers=config.input.workers,
                device=device,
                title="validating",
            )
            lr = lr_at(progress.step - 1, steps, warmup, optim)
            if not np.isfinite(logits).all():
                raise UserError(diverged(run, progress.step - 1, lr, progress.mean("loss"), math.nan))
            metrics = measure(logits, truth, data.classes)
            progress.close_epoch(metrics, lr)
            if metrics.top1 >= progress.best:
                progress.best = metrics.top1
                save(run / WEIGHTS_FILE, kept, card.measured(metrics.summary() | {"epoch": epoch}))
            journal.epoch(progress.rows, optim.epochs)
            checkpoint()
        if progress.step == steps:
            return

        batches = loader.epoch(epoch, first * accumulate)
        for step in journal.steps(progress, per_epoch, optim):
            lr = lr_at(step, steps, warmup, optim)
            set_lr(optimizers, lr)
            torch.manual_seed(derive(seed, step, 0))  # dropout and stochastic depth
            generator = torch.Generator().manual_seed(derive(seed, step, 1))  # augmentation
            sums = {"loss": 0.0, "top1": 0.0}
            for _ in range(accumulate):
                with progress.waiting():
                    pixels, labels = next(batches)
                images, targets = augment(
                    pixels.to(device),
                    labels.to(device),
                    config.augment,
                    preprocess.normalise,
                    classes,
                    generator,
                )
                with torch.autocast(torch.device(device).type, precision, enabled=config.run.amp != "off"):
                    result = objective(images, targets)
                scaler.scale(result["loss"] / accumulate).backward()
                sums = {name: total + result[name].item() / accumulate for name, total in sums.items()}
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            norm = clip_grad_norm_(model.parameters(), optim.clip_grad or math.inf).item()
            if not math.isfinite(sums["loss"]) or not (math.isfinite(norm) or scaler.is_enabled()):
                raise UserError(diverged(run, step, lr, sums["loss"], norm))
            for optimizer in optimizers:
                scaler.step(optimizer)
                optimizer.zero_grad(set_to_none=True)
            scaler.update()
            if ema is not None:
                ema.update(model, step)
            progress.add(sums)
            if interruption.requested or progress.minutes_unsaved() >= config.run.save_minutes:
                if not all(p.isfinite().all() for p in model.parameters()):
                    raise UserError(diverged(run, step, lr, sums["loss"], norm))
                checkpoint()
            if interruption.requested:
                raise KeyboardInterrupt
