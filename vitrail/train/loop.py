"""Training, from top to bottom: set up, data, model and objective, optimiser, resume, loop.

A run is a pure function of its configuration. Every batch, augmentation and dropout mask is drawn from
(seed, step), so a run that goes on from any checkpoint ends with the very weights it would have had.
"""

from __future__ import annotations

import math
import tempfile
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils import clip_grad_norm_

from vitrail.config import TrainConfig, coerce, flat, override
from vitrail.data import Data, full_name, open_data
from vitrail.data.augment import augment, is_deterministic
from vitrail.data.cache import once
from vitrail.data.loader import TrainBatches
from vitrail.device import hardware
from vitrail.errors import UserError, shortlist
from vitrail.evaluate.features import run_split
from vitrail.evaluate.metrics import AnyMetrics, measure_model, measured
from vitrail.evaluate.verbs import evaluate_on
from vitrail.models import Model, build, head
from vitrail.models.vit import ViT
from vitrail.progress import log, log_to_console
from vitrail.train.checkpoint import Stateful, load_checkpoint, restore_parts, save_checkpoint
from vitrail.train.find_lr import RangeTest
from vitrail.train.journal import Journal
from vitrail.train.lora import merged
from vitrail.train.memory import keep_freed_memory, recompute_activations
from vitrail.train.objectives import build_objective
from vitrail.train.optim import Ema, build_optimizers, set_lr
from vitrail.train.resolve import free_name, model_config, preprocessing, resolve
from vitrail.train.run import (
    Diverged,
    Interruption,
    Progress,
    create_run,
    derive,
    describe,
    diverged,
    reopen,
    split_settings,
    uneven,
)
from vitrail.train.schedule import Schedule, images_per_second
from vitrail.train.teacher import Teacher, meet
from vitrail.train.transfer import set_learning, set_mode
from vitrail.weights import WEIGHTS_FILE, Card, absolute, save, start_from
from vitrail.weights.card import versions


def train(source: str | None, resume: str | None, overwrite: bool, find_lr: bool, asked: dict[str, Any]) -> Path:
    """Trains and evaluates; `vitrail.train` is this with keywords."""
    log_to_console()
    keep_freed_memory()
    if find_lr and (resume is not None or overwrite):
        raise UserError("--find-lr makes a folder of its own and begins anew: leave out --resume and --overwrite.")
    asked = given(asked)
    if find_lr and asked.get("folds"):
        raise UserError("--find-lr is one short run: leave out --folds.")
    if resume is not None:
        run, config = reopen(Path(resume), source, asked)
        data = open_data(config.data, **split_settings(flat(config)))
        model, notes = prepare(config, data)
    elif source is not None:
        data = open_data(source, **split_settings(asked))
        config = plan(full_name(source), data, asked)
        model, notes = prepare(config, data)  # whatever can be refused is refused before there is a folder
        if find_lr:
            return find_rate(config, data, model)
        run = create_run(config, overwrite)
    else:
        raise UserError("There is nothing to train on: give a data set, or --resume RUN to go on with a run.")
    complete(run, config, data, model, notes)
    return run


def given(asked: dict[str, Any]) -> dict[str, Any]:
    """What was asked for, in the types of the configuration."""
    asked = {name: coerce(TrainConfig, name, value) for name, value in asked.items()}
    for name in ("weights", "teacher"):
        if asked.get(name) is not None:
            asked[name] = absolute(asked[name])
    return asked


def complete(run: Path, config: TrainConfig, data: Data, model: Model, notes: list[str]) -> dict[str, AnyMetrics]:
    """Trains a run in its folder to its end, from wherever it is, and evaluates it; returns what was measured."""
    with Journal(run) as journal, Interruption(run) as interruption:
        for line in (describe(config, data, model), *notes):
            log.info(line)
        if warning := uneven(config, data):
            log.warning(warning)
        optimise(run, config, data, model, journal, interruption)
        metrics = evaluate_on(run, data, "val", device=config.run.device, workers=config.source.workers)
        log.info(metrics.table())
        results = {"val": metrics}
        if config.source.fold and "test" in data.splits:  # by the same images, folds can be compared
            results["test"] = evaluate_on(run, data, "test", device=config.run.device, workers=config.source.workers)
        if data.unreadable:
            names = [f"{file} ({reason})" for file, reason in data.unreadable]
            log.warning(f"{len(names)} images could not be read and were left out: {shortlist(names, 10)}.")
        log.info(f"The run is in {run}. Next: vitrail predict {run} IMAGES")
    return results


def plan(source: str, data: Data, asked: dict[str, Any]) -> TrainConfig:
    """The complete configuration. The epochs that fit into a time budget are estimated, as recipes depend on them."""
    config = resolve(source, data, asked)
    if config.optim.time_budget is None:
        return config
    if "epochs" in asked:
        raise UserError("Both --epochs and --time-budget say how long to train. Give one of them.")
    rate = images_per_second(prepare(config, data)[0], config.optim.batch_size, config.run.device)
    epochs = math.ceil(config.optim.time_budget * rate / len(data.splits["train"]))
    return resolve(source, data, asked | {"epochs": epochs})


def prepare(config: TrainConfig, data: Data) -> tuple[Model, list[str]]:
    """The model as training begins, fresh or from trained weights, and a sentence on each thing adapted in these."""
    torch.manual_seed(config.run.seed)
    model = build(model_config(config, len(data.classes)))
    notes = []
    if config.weights is not None:
        how = config.transfer
        notes = start_from(
            config.weights, model, data.classes, data.task, resample=how.pos_resample, partial=how.partial
        )
        set_learning(model, how)
    if config.optim.loss == "bce" and config.weights is None:
        # A fresh head takes every class for as rare as it is, or the first steps are spent on learning that.
        heads = [head(model)]
        if isinstance(model, ViT) and model.head_dist is not None:
            heads.append(model.head_dist)
        for last in heads:
            assert last.bias is not None
            torch.nn.init.constant_(last.bias, -math.log(len(data.classes)))
    if config.distillation.teacher is not None:
        meet(config.distillation, data.classes, data.task, preprocessing(config))
    batches = max(len(data.splits["train"]) // config.optim.batch_size, 1)
    if batches < config.optim.grad_accum_steps:
        raise UserError(
            f"An epoch has {batches} batches, fewer than the {config.optim.grad_accum_steps} that one step "
            "accumulates. Lower --grad-accum-steps or --batch-size."
        )
    return model, [f"From {config.weights}: {note}." for note in notes]


def find_rate(config: TrainConfig, data: Data, model: Model) -> Path:
    """Finds a learning rate instead of training; returns the folder with the curve. Stopped, it leaves nothing."""
    batches = max(len(data.splits["train"]) // config.optim.batch_size, 1)
    test = RangeTest(config.optim, batches // config.optim.grad_accum_steps, 0)
    config = override(config, {"model_ema": 0.0, "save_minutes": math.inf, "name": f"{config.run.name}-find-lr"})
    log.info(describe(config, data, model))
    with tempfile.TemporaryDirectory() as scratch, Journal(Path(scratch)) as journal, suppress(Diverged):
        optimise(Path(scratch), config, data, model, journal, Interruption(Path(scratch)), test)
    lr = test.suggestion()
    folder = test.save(Path(config.run.out) / free_name(config.run))
    if (fall := test.fall()) < 0.05:
        log.warning(f"The loss came down by {fall:.1%} only, so the suggestion means little. Look at the curve.")
    log.info(f"The loss falls fastest at a learning rate of {lr:g}; the recipe's is {config.optim.lr:g}.")
    log.info(f"The curve is {folder / 'lr.png'}. Next: vitrail train {config.data} … --lr {lr:g}")
    return folder


def optimise(
    run: Path,
    config: TrainConfig,
    data: Data,
    model: Model,
    journal: Journal,
    interruption: Interruption,
    test: RangeTest | None = None,
) -> None:
    """The loop itself, in a run folder that exists; a range test has its own schedule and no validation."""
    device, seed, optim = config.run.device, config.run.seed, config.optim
    accumulate, classes = optim.grad_accum_steps, len(data.classes)

    # Data
    preprocess = preprocessing(config)
    data = data.read_as(preprocess.channels, preprocess.bits)
    keep = config.source.cache_gb, config.source.workers
    val_split = once(data.splits["val"], preprocess, False, *keep)
    loader = TrainBatches(
        once(data.splits["train"], preprocess, config.augment.crop_scale < 1, *keep),
        preprocess,
        optim.batch_size,
        seed,
        config.augment.crop_scale,
        config.source.workers,
        config.source.balanced_sampling,
    )
    per_epoch = len(loader) // accumulate
    validation = len(data.splits["val"]) / (optim.batch_size * accumulate)
    schedule = test or Schedule(optim, per_epoch, validation)

    # Model and objective
    model.to(device)
    ema = Ema(model, optim.model_ema) if optim.model_ema else None
    kept = ema.model if ema else model
    if config.run.grad_checkpointing:
        recompute_activations(model)
    if config.run.compile:
        model.compile()
    card = Card(
        model=config.model,
        config=model.config,
        classes=data.classes,
        preprocess=preprocess,
        task=data.task,
        versions=versions() | {"hardware": hardware(device)},
    ).standardising(data.splits["train"].targets)
    teacher = Teacher(config.distillation, card, device) if config.distillation.teacher is not None else None
    objective = build_objective(model, card, config, data.splits["train"].targets)

    # Optimiser
    optimizers = build_optimizers(model, optim, pretrained=config.weights is not None)
    scaler = torch.amp.GradScaler(device, enabled=config.run.amp == "fp16")
    precision = torch.bfloat16 if config.run.amp == "bf16" else torch.float16
    autocast = partial(torch.autocast, torch.device(device).type, precision, enabled=config.run.amp != "off")

    # Resume
    parts: dict[str, Stateful] = {"model": model, "kept": kept, "scaler": scaler}
    parts |= {f"optimizer {i}": optimizer for i, optimizer in enumerate(optimizers)}
    if teacher is not None:
        parts["teacher"] = teacher
    progress = Progress()
    if (state := load_checkpoint(run, device)) is not None:
        progress = Progress.restore(restore_parts(run, state, parts), data)
        log.info(f"Going on after step {progress.step}.")

    # Teacher
    if teacher is not None:
        with autocast():
            card = replace(card, teacher=teacher.introduce(val_split, config.source.workers))
            if is_deterministic(config.augment) and test is None and not schedule.over(progress):
                teacher.answer_once(loader.split, config.source.workers)
        progress.prepared += progress.tick()

    def checkpoint() -> None:
        save_checkpoint(run, progress.state(data) | {name: part.state_dict() for name, part in parts.items()})

    # Loop
    while True:
        epoch, first = divmod(progress.step, per_epoch)
        over = schedule.over(progress)
        if progress.count and (over or not first) and test is None:
            plain = merged(kept)
            logits, truth = run_split(
                plain,
                val_split,
                preprocess,
                workers=config.source.workers,
                device=device,
                title="validating",
            )
            if not np.isfinite(logits).all():
                raise diverged(run, progress.step - 1, progress.lr, progress.mean("loss"), math.nan)
            metrics = measure_model(card, logits, truth)
            progress.close_epoch(metrics)
            if metrics.main >= progress.best:
                progress.best = metrics.main
                save(run / WEIGHTS_FILE, plain, measured(card, metrics, len(progress.rows)))
            journal.epoch(progress.rows, schedule, over)
            checkpoint()
        if over:
            return

        set_mode(model)
        batches = loader.epoch(epoch, first * accumulate)
        numbers = iter(loader.numbers(epoch, first * accumulate))
        for step in journal.steps(progress, schedule):
            progress.lr = schedule.lr(progress)
            set_lr(optimizers, progress.lr)
            torch.manual_seed(derive(seed, step, 0))  # dropout and stochastic depth
            generator = torch.Generator().manual_seed(derive(seed, step, 1))  # augmentation
            sums: dict[str, float] = {}
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
                with autocast():
                    if teacher is None:
                        result = objective(images, targets)
                    else:
                        with progress.teaching():
                            taught = teacher(images, next(numbers))
                        result = objective(images, targets, taught)
                scaler.scale(result["loss"] / accumulate).backward()
                sums = {name: sums.get(name, 0.0) + value.item() / accumulate for name, value in result.items()}
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            norm = clip_grad_norm_(model.parameters(), optim.clip_grad or math.inf).item()
            if not math.isfinite(sums["loss"]) or not (math.isfinite(norm) or scaler.is_enabled()):
                raise diverged(run, step, progress.lr, sums["loss"], norm)
            for optimizer in optimizers:
                scaler.step(optimizer)
                optimizer.zero_grad(set_to_none=True)
            scaler.update()
            if ema is not None:
                ema.update(model, step)
            progress.add(sums)
            if interruption.requested or progress.minutes_unsaved() >= config.run.save_minutes:
                if not all(p.isfinite().all() for p in model.parameters()):
                    raise diverged(run, step, progress.lr, sums["loss"], norm)
                checkpoint()
            if interruption.requested:
                raise KeyboardInterrupt
            if schedule.over(progress):
                break
