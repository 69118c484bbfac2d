"""Runs from start to finish: `start` opens the data and the folder, `complete` trains in it, `finish` evaluates."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import nn

from vitrail.config import ArchConfig, TrainConfig, Verb, flat, options
from vitrail.config.splits import split_settings
from vitrail.data import Data, Source, full_name, is_object, open_data
from vitrail.device import keep_freed_memory
from vitrail.errors import UserError, nearest, shortlist, shown
from vitrail.evaluate.measure import evaluate_on
from vitrail.files import locked
from vitrail.models import Model, register_module
from vitrail.progress import log, log_to_console
from vitrail.runs.run import Run
from vitrail.tasks import METHODS, TASKS
from vitrail.tasks.scores import Scores
from vitrail.train.calibrate import calibrate
from vitrail.train.checkpoint import Checkpoints, checkpoint_path
from vitrail.train.custom import NOTHING, Custom
from vitrail.train.divergence import naming_checkpoint
from vitrail.train.find_lr import find_lr as find_rate
from vitrail.train.interruption import Interruption
from vitrail.train.journal import Journal, Silence
from vitrail.train.loop import train
from vitrail.train.prepare import prepare
from vitrail.train.recipes import method_of
from vitrail.train.resolve import plan, typed
from vitrail.train.resume import reopen, save_extended
from vitrail.train.summary import describe, kept_epoch, pretrained_flags, uneven
from vitrail.world import World, launch, world

HELD_OUT = 0.05  # share of images held out for validation in pre-training, which has no labels to overfit
# Augmentation that the caller's own replaces, unless it is asked for; label smoothing is not of images.
REPLACED = ("shift", "hflip", "randaug", "three_augment", "color_jitter", "reprob", "mixup", "cutmix")


def start(
    source: Source | None,
    resume: str | None,
    overwrite: bool,
    find_lr: bool,
    asked: dict[str, Any],
    custom: Custom = NOTHING,
    data_changed: bool = False,
) -> Run:
    """Starts or resumes a run and returns it; `vitrail.train` is this with keywords."""
    val, asked = asked.get("val"), prepared(source, asked, custom, "train")
    if find_lr and (resume is not None or overwrite or asked.get("folds")):
        raise UserError("--find-lr is a short run in a folder of its own. Remove --resume, --overwrite and --folds.")
    if find_lr and source is not None:
        data = open_given(source, val, asked)
        config = world().once(lambda: plan(full_name(source), data, asked, custom))
        return Run(find_rate(config, data, prepare(config, data, custom)[0], custom))
    return _run(source, val, resume, overwrite, asked, custom, "train", data_changed)


def start_pretraining(
    source: Source | None,
    resume: str | None,
    overwrite: bool,
    method: str | None,
    asked: dict[str, Any],
    custom: Custom = NOTHING,
    data_changed: bool = False,
) -> Run:
    """Starts or resumes a self-supervised run and returns it; `vitrail.pretrain` is this with keywords."""
    val, asked = asked.get("val"), prepared(source, asked, custom, "pretrain")
    own = {name for name, task in TASKS.items() if not task.labelled}
    if method is not None and method not in {*METHODS, *own}:
        raise UserError(
            f"'method' must be one of {', '.join(METHODS)}, but it is {shown(method)}.{nearest(method, METHODS)}"
        )
    if asked.get("probe") is not None:
        asked["probe"] = full_name(asked["probe"])
    if resume is None:
        asked = {"val_fraction": HELD_OUT, **asked, "task": method or method_of(asked.get("recipe"))}
    elif method is not None:
        asked["task"] = method
    return _run(source, val, resume, overwrite, asked, custom, "pretrain", data_changed)


def prepared(source: Source | None, asked: dict[str, Any], custom: Custom, verb: Verb) -> dict[str, Any]:
    """The user's settings, with names in place of Python objects, once logging and memory are set up."""
    World.join()
    log_to_console()
    keep_freed_memory()
    given = {"data": source, "val": asked.get("val")}
    python = (*(name for name, value in given.items() if value is not None and is_object(value)), *custom.names)
    if given["val"] is not None:
        asked = asked | {"val": full_name(given["val"])}
    if custom.model is not None:
        asked = _architecture(custom.model) | asked | {"model": register_module(custom.model)}
    if custom.augment is not None:
        asked = dict.fromkeys(REPLACED, 0) | {"crop_scale": 1.0} | asked
    return typed(asked, verb) | ({"python": python} if python else {})


def _architecture(module: nn.Module) -> dict[str, Any]:
    """The settings that a model's configuration determines."""
    if not isinstance(module, Model):
        return {}
    names = {"img_size", "channels", *options(ArchConfig)} & {field.name for field in fields(module.config)}
    return {name: getattr(module.config, name) for name in names}


def open_given(source: Source, val: Source | None, settings: Mapping[str, Any]) -> Data:
    """The data of a run, with objects in place of their names in the settings."""
    settings = split_settings(settings) | ({} if val is None else {"val": val})
    return world().in_turn(lambda: open_data(source, **settings))


def _run(
    source: Source | None,
    val: Source | None,
    resume: str | None,
    overwrite: bool,
    asked: dict[str, Any],
    custom: Custom,
    verb: Verb,
    data_changed: bool,
) -> Run:
    need_resume(resume, data_changed)
    resume = resume or earlier(source, asked, overwrite)
    if resume is not None:
        reopened, config = world().once(lambda: reopen(Path(resume), source, asked, verb))
        run = Run(reopened)
        given = {"data", "val"} & {*(config.python or ())}
        if given:
            data = open_given(config.data if source is None else source, val, flat(config))
        else:
            data = world().in_turn(run.data)
        model, notes = world().in_turn(lambda: prepare(config, data, custom))
    elif source is not None:
        data = open_given(source, val, asked)
        config = world().once(lambda: plan(full_name(source), data, asked, custom))  # it may measure the machine
        # Before the folder is created, so that errors leave none behind.
        model, notes = world().in_turn(lambda: prepare(config, data, custom))
        run = create(config, overwrite, command(source, asked))
    else:
        if folder := asked.get("data_dir"):
            raise UserError(
                f"No data was given: --data-dir is the folder of the built-in data sets. Use `vitrail {verb} {folder}`."
            )
        raise UserError("No data was given. Give a data set, or --resume RUN to continue a run.")
    if config.python:
        run.remember(data)
    complete(run.path, config, data, model, notes, custom, data_changed)
    return run


def earlier(source: Source | None, asked: Mapping[str, Any], overwrite: bool) -> str | None:
    """The unfinished run of this command, if torchrun starts it again, or is started again with the same --rdzv-id."""
    if source is None or not launch() or (overwrite and not world().restarted):
        return None
    folder, name = Path(asked.get("out", options()["out"].default)), command(source, asked)

    def found() -> str | None:
        runs = (run for run in map(Run, folder.glob("*/")) if run.launch == name)
        return next((str(run) for run in runs if world().restarted or not run.finished), None)

    return world().once(found)


def command(source: Source, asked: Mapping[str, Any]) -> str:
    """A name of this command, the same when torchrun starts it again; empty without torchrun."""
    return launch() and f"{launch()} {full_name(source)} {sorted(asked.items())}"


def create(config: TrainConfig, overwrite: bool, name: str) -> Run:
    """The folder of a new run, made by the first process; `name` is that of the command."""
    return Run(world().once(lambda: Run.create(config, overwrite, name).path))


def need_resume(resume: str | None, data_changed: bool) -> None:
    """Raises UserError for --data-changed without --resume."""
    if data_changed and resume is None:
        raise UserError("--data-changed continues a run although its data has changed. Add --resume RUN, or remove it.")


def complete(
    run: Path,
    config: TrainConfig,
    data: Data,
    model: Model,
    notes: list[str],
    custom: Custom = NOTHING,
    data_changed: bool = False,
) -> dict[str, Scores]:
    """Trains a run to its end, from its last checkpoint; returns the final scores by split."""
    first = world().first()
    _check_shared(run)
    with (
        locked(run) if first else nullcontext(),
        Journal(run) if first else Silence() as journal,
        Interruption(run) as stop,
        naming_checkpoint(run),
    ):
        if first:
            save_extended(run, config)
        for line in (describe(config, data, model), *notes):
            log.info(line)
        if (flags := pretrained_flags(config, data)) and not checkpoint_path(run).exists():
            log.info(f"Photographs learn faster and better from pre-trained weights: add {flags}")
        if warning := uneven(config, data):
            log.warning(warning)
        with Checkpoints(run) as checkpoints:
            train(run, config, data, model, journal, stop, checkpoints, world(), custom, data_changed)
        stop.training_is_over()
        world().once(lambda: None)  # the first process has written the model
        return finish(run, config, data)


def _check_shared(run: Path) -> None:
    """Raises UserError unless all processes see the folder of the run, which the first one has made."""
    seen = (Run(run).config_file.exists() for _ in _patiently())
    missing = [rank for rank, there in enumerate(world().every(any(seen))) if not there]
    if missing:
        raise UserError(
            f"{run} is not the same folder on all machines: process {missing[0]} does not see it. Choose an --out on a "
            "file system that all machines share."
        )


def _patiently() -> Iterator[None]:
    """Looks for up to half a minute: a network file system may show a new file late."""
    yield
    for _ in range(60):
        time.sleep(0.5)
        yield


def finish(run: Path, config: TrainConfig, data: Data) -> dict[str, Scores]:
    """Calibrates and evaluates the saved model, and logs what to do next; returns the scores by split.

    A fold is also evaluated on the test split, where folds can be compared on the same images. A self-supervised model
    has no predictions to evaluate.
    """
    if not data.task.labelled:
        log.info(f"The run is in {run}. Next: vitrail train LABELLED --weights {run}")
        return {}
    splits = ["val", "test"] if config.source.fold and "test" in data.splits else ["val"]
    how: dict[str, Any] = {"device": config.run.device, "workers": config.source.workers}
    rows, card = Run(run).history, Run(run).card
    if not Run(run).used_up:
        title = card.task.chosen(config.stop.best).title
        stalled = f"{title} has not improved for {config.stop.patience} epochs"
        log.info(f"Stopped after epoch {len(rows)}: {stalled if Run(run).finished else 'on_epoch returned True'}.")
    log.info(f"Kept {kept_epoch(card, rows, config.stop.best)}.")
    if line := calibrate(Run(run), data, **how):
        log.info(line)
    scores = {split: evaluate_on(run, data, split, **how) for split in splits}
    log.info(scores["val"].table())
    if data.unreadable:
        names = [f"{file} ({reason})" for file, reason in data.unreadable]
        log.warning(f"{len(names)} images could not be read and were left out: {shortlist(names, 10)}.")
    log.info(f"The run is in {run}. Next: {data.task.usage.replace('RUN', str(run))}")
    return scores
