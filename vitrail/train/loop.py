"""Training, from top to bottom: set up, data, model and objective, optimiser, resume, loop.

A run is a pure function of its configuration. Every batch, augmentation and dropout mask is drawn from
(seed, step), so a run that goes on from any checkpoint ends with the very weights it would have had.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.nn.utils import clip_grad_norm_

from vitrail.config import TrainConfig, flat
from vitrail.data import Data, open_data
from vitrail.data.augment import augment
from vitrail.data.loader import TrainBatches
from vitrail.data.preprocess import Preprocess
from vitrail.errors import UserError, some
from vitrail.evaluate.metrics import measure
from vitrail.evaluate.verbs import evaluate_on, predict_split
from vitrail.models import build
from vitrail.progress import log, speak
from vitrail.train.checkpoint import load_checkpoint, save_checkpoint
from vitrail.train.journal import Journal
from vitrail.train.memory import recompute_activations
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


def train(source: str | None, resume: str | None, overwrite: bool, asked: Mapping[str, object]) -> Path:
    """Trains and evaluates; `vitrail.train` is this with keywords."""
    speak()
    if resume is not None:
        run, config = reopen(Path(resume), source, asked)
        data = open_data(config.data, **split_settings(flat(config)))
    elif source is not None:
        data = open_data(source, **split_settings(asked))
        config = resolve(source, data, asked)
        run = create_run(config, overwrite)
    else:
        raise UserError("There is nothing to train on: give a data set, or --resume RUN to go on with a run.")
    with Journal(run) as journal, Interruption(run) as interruption:
        log.info(describe(config, data, model_config(config, len(data.classes))))
        optimise(run, config, data, journal, interruption)
        metrics = evaluate_on(run, data, "val", device=config.run.device, workers=config.input.workers)
        log.info(metrics.table())
        if data.unreadable:
            names = [f"{file} ({reason})" for file, reason in data.unreadable]
            log.warning(f"{len(names)} images could not be read and were left out: {some(names, 10)}.")
        log.info(f"The run is in {run}. Next: vitrail predict {run} IMAGES")
    return run


def optimise(run: Path, config: TrainConfig, data: Data, journal: Journal, interruption: Interruption) -> None:
    """The loop itself, in a run folder that exists."""
    device, seed, optim = config.run.device, config.run.seed, config.optim
    accumulate, classes = optim.grad_accum_steps, len(data.classes)

    # Data
    preprocess = Preprocess(config.input.img_size, config.input.channels, config.input.crop)
    loader = TrainBatches(
        data.splits["train"],
        preprocess,
        optim.batch_size,
        seed,
        config.augment.crop_scale,
        config.input.workers,
    )
    per_epoch = len(loader) // accumulate
    if per_epoch == 0:
        raise UserError(
            f"An epoch has {len(loader)} batches, fewer than the {accumulate} that one step accumulates. "
            "Lower --grad-accum-steps or --batch-size."
        )
    steps, warmup = per_epoch * optim.epochs, round(per_epoch * optim.warmup_epochs)

    # Model and objective
    torch.manual_seed(seed)
    model = build(model_config(config, classes))
    if config.weights is not None:
        for note in start_from(config.weights, model, data.classes):
            log.info(f"From {config.weights}: {note}.")
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
    progress = Progress()
    if (state := load_checkpoint(run, device)) is not None:
        progress = Progress.restore(state, data)
        model.load_state_dict(state["model"])
        kept.load_state_dict(state["kept"])
        for optimizer, optimizer_state in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(optimizer_state)
        scaler.load_state_dict(state["scaler"])
        log.info(f"Going on from step {progress.step} of {steps}.")

    def checkpoint() -> None:
        save_checkpoint(
            run,
            progress.state(data)
            | {
                "model": model.state_dict(),
                "kept": kept.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                "scaler": scaler.state_dict(),
            },
        )

    # Loop
    while True:
        epoch, first = divmod(progress.step, per_epoch)
        if len(progress.rows) < epoch:
            logits, truth = predict_split(
                kept,
                data.splits["val"],
                preprocess,
                workers=config.input.workers,
                device=device,
                title="validating",
            )
            metrics = measure(logits, truth, data.classes)
            progress.close_epoch(metrics, lr=lr_at(progress.step - 1, steps, warmup, optim))
            if metrics.top1 >= progress.best:
                progress.best = metrics.top1
                save(run / WEIGHTS_FILE, kept, card.measured(metrics.summary() | {"epoch": epoch}))
            checkpoint()
            journal.epoch(progress.rows, optim.epochs)
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
            if interruption.requested:
                checkpoint()
                raise KeyboardInterrupt
            if progress.minutes_unsaved() >= config.run.save_minutes:
                checkpoint()
