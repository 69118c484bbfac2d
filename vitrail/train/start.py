"""Runs from start to finish: `start` opens the data and the folder, `complete` trains in it, `finish` evaluates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vitrail.config import TrainConfig, Verb
from vitrail.data import Data, full_name, open_data
from vitrail.device import keep_freed_memory
from vitrail.errors import UserError, shortlist
from vitrail.evaluate.measure import evaluate_on
from vitrail.models import Model
from vitrail.progress import log, log_to_console
from vitrail.runs.run import Run, split_settings
from vitrail.tasks.scores import Scores
from vitrail.train.calibrate import calibrate
from vitrail.train.divergence import naming_checkpoint
from vitrail.train.find_lr import find_lr as find_rate
from vitrail.train.interruption import Interruption
from vitrail.train.journal import Journal
from vitrail.train.loop import train
from vitrail.train.prepare import prepare
from vitrail.train.resolve import plan, typed
from vitrail.train.resume import reopen, save_extended
from vitrail.train.summary import describe, kept_epoch, pretrained_flags, uneven
from vitrail.train.world import World

HELD_OUT = 0.05  # share of images held out for validation in pre-training, which has no labels to overfit
DEFAULT_METHOD = "mae"


def start(source: str | None, resume: str | None, overwrite: bool, find_lr: bool, asked: dict[str, Any]) -> Path:
    """Starts or resumes a run and returns its folder; `vitrail.train` is this with keywords."""
    asked = _prepared(asked, "train")
    if find_lr and (resume is not None or overwrite or asked.get("folds")):
        raise UserError("--find-lr is a short run in a folder of its own. Remove --resume, --overwrite and --folds.")
    if find_lr and source is not None:
        data = open_data(source, **split_settings(asked))
        config = plan(full_name(source), data, asked)
        return find_rate(config, data, prepare(config, data)[0])
    return _run(source, resume, overwrite, asked, "train")


def start_pretraining(
    source: str | None, resume: str | None, overwrite: bool, method: str | None, asked: dict[str, Any]
) -> Path:
    """Starts or resumes a self-supervised run and returns its folder; `vitrail.pretrain` is this with keywords."""
    asked = _prepared(asked, "pretrain")
    if asked.get("probe") is not None:
        asked["probe"] = full_name(asked["probe"])
    if resume is None:
        asked = {"val_fraction": HELD_OUT, **asked, "task": method or DEFAULT_METHOD}
    elif method is not None:
        asked["task"] = method
    return _run(source, resume, overwrite, asked, "pretrain")


def _prepared(asked: dict[str, Any], verb: Verb) -> dict[str, Any]:
    """The user's settings, once logging and memory are set up."""
    log_to_console()
    keep_freed_memory()
    return typed(asked, verb)


def _run(source: str | None, resume: str | None, overwrite: bool, asked: dict[str, Any], verb: Verb) -> Path:
    if resume is not None:
        run, config = reopen(Path(resume), source, asked, verb)
        data = Run(run).data()
        model, notes = prepare(config, data)
        save_extended(run, config)
    elif source is not None:
        data = open_data(source, **split_settings(asked))
        config = plan(full_name(source), data, asked)
        model, notes = prepare(config, data)  # before the folder is created, so that errors leave none behind
        run = Run.create(config, overwrite).path
    else:
        if folder := asked.get("data_dir"):
            raise UserError(
                f"No data was given: --data-dir is the folder of the built-in data sets. Use `vitrail {verb} {folder}`."
            )
        raise UserError("No data was given. Give a data set, or --resume RUN to continue a run.")
    complete(run, config, data, model, notes)
    return run


def complete(run: Path, config: TrainConfig, data: Data, model: Model, notes: list[str]) -> dict[str, Scores]:
    """Trains a run to its end, from its last checkpoint; returns the final scores by split."""
    with Journal(run) as journal, Interruption(run) as interruption, naming_checkpoint(run):
        for line in (describe(config, data, model), *notes):
            log.info(line)
        if flags := pretrained_flags(config, data):
            log.info(f"Photographs learn faster and better from pre-trained weights: add {flags}")
        if warning := uneven(config, data):
            log.warning(warning)
        train(run, config, data, model, journal, interruption, World.join())
        return finish(run, config, data)


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
        log.info(f"Stopped after epoch {len(rows)}: {title} has not improved for {config.stop.patience} epochs.")
    log.info(f"Kept {kept_epoch(card, rows, config.stop.best)}.")
    if line := calibrate(Run(run), data, **how):
        log.info(line)
    scores = {split: evaluate_on(run, data, split, **how) for split in splits}
    log.info(scores["val"].table())
    if data.unreadable:
        names = [f"{file} ({reason})" for file, reason in data.unreadable]
        log.warning(f"{len(names)} images could not be read and were left out: {shortlist(names, 10)}.")
    log.info(f"The run is in {run}. Next: vitrail predict {run} IMAGES")
    return scores
