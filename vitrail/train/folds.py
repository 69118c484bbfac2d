"""Cross-validation: one run per fold, with the mean and standard deviation of their scores.

Like a run, the folder of a cross-validation has a `config.yaml`, with `fold: 0`. The folds are ordinary runs in it that
differ only in their number. `folds.json` records the finished ones, so that an interrupted cross-validation resumes.
"""

from __future__ import annotations

import csv
import io
import json
import statistics
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from vitrail.config import TrainConfig, flat, override
from vitrail.data import Source, full_name
from vitrail.errors import UserError
from vitrail.files import locked, read_json, write_text
from vitrail.progress import log
from vitrail.runs.run import Run
from vitrail.train.custom import NOTHING, Custom
from vitrail.train.prepare import prepare
from vitrail.train.resolve import plan
from vitrail.train.resume import reopen
from vitrail.train.start import command, complete, create, earlier, need_resume, open_given, prepared
from vitrail.world import world

Scores = dict[str, float]  # "val_top1", "val_loss", "test_top1", …


def wanted(resume: str | Path | None, asked: dict[str, Any]) -> bool:
    """Whether a call asks for a cross-validation rather than a single run."""
    if resume is not None and Run(resume).exists:
        return Run(resume).has_folds
    return bool(asked.get("folds")) and not asked.get("fold")


def train(
    source: Source | None,
    resume: str | None,
    overwrite: bool,
    asked: dict[str, Any],
    custom: Custom = NOTHING,
    data_changed: bool = False,
) -> Run:
    """Trains all unfinished folds; returns the run that holds them."""
    need_resume(resume, data_changed)
    asked = prepared(source, asked, custom, "train")
    resume = resume or earlier(source, asked, overwrite)
    if resume is not None:
        run, config = world().once(lambda: reopen(Path(resume), source, asked))
        source = config.data if source is None else source
    elif source is not None:
        data = open_given(source, None, asked | {"fold": 1})
        config = world().once(lambda: plan(full_name(source), data, asked, custom))
        world().in_turn(lambda: prepare(config, data, custom))  # before the folder is created: errors leave none behind
        run = create(config, overwrite, command(source, asked)).path
    else:
        raise UserError("No data was given. Give a data set, or --resume RUN to continue a run.")

    whole = Run(run)
    with locked(run) if world().first() else nullcontext():
        done = world().once(lambda: _read(run))
        try:
            for number in range(1, config.source.folds + 1):
                if str(number) not in done:
                    log.info(f"Fold {number} of {config.source.folds}:")
                    numbered = override(config, {"fold": number})
                    fold, done[str(number)] = _train_fold(run, numbered, source, custom, data_changed)
                    whole.holds += (fold,)
                    if world().first():
                        _write(run, done)
        except KeyboardInterrupt:
            log.info(f"To resume this fold and train the rest: {Run(run).resume_command}")
            raise
    log.info(table(done))
    log.info(f"The folds are in {run}.")
    return whole


def _train_fold(
    run: Path, config: TrainConfig, source: Source, custom: Custom, data_changed: bool
) -> tuple[Run, Scores]:
    """Starts or resumes a fold; returns it and its scores."""
    fold = Run(run).fold(config.source.fold)
    config = override(config, {"out": str(run), "name": fold.name})
    data = open_given(source, None, flat(config))
    model, notes = prepare(config, data, custom)
    world().once(lambda: fold.exists or Run.create(config).exists)
    if config.python:
        fold.remember(data)
    measured = complete(fold.path, config, data, model, notes, custom, data_changed)
    shown = {measure.name for measure in data.task.measures}
    return fold, {
        f"{split}_{name}": value
        for split, metrics in measured.items()
        for name, value in metrics.summary().items()
        if name in shown
    }


def averages(done: dict[str, Scores]) -> dict[str, Scores]:
    """The mean of every score over the folds, and its sample standard deviation."""
    columns = {name: [scores[name] for scores in done.values()] for name in next(iter(done.values()))}
    means = {name: statistics.fmean(values) for name, values in columns.items()}
    spreads = {name: statistics.stdev(values) if len(values) > 1 else 0.0 for name, values in columns.items()}
    return {"mean": means, "std": spreads}


def table(done: dict[str, Scores]) -> str:
    """The scores as text: a line for each fold, then the mean and the standard deviation."""
    names = list(next(iter(done.values())))
    width = max(map(len, names)) + 2
    lines = ["fold  " + "".join(name.replace("_", " ").rjust(width) for name in names)]
    for label, scores in (done | averages(done)).items():
        lines.append(f"{label:<6}" + "".join(f"{scores[name]:>{width}.4f}" for name in names))
    return "\n".join(lines)


def _read(run: Path) -> dict[str, Scores]:
    """The scores of the finished folds, by number."""
    file = Run(run).folds_file
    if not file.exists():
        return {}
    try:
        done = read_json(file)["folds"].items()
        return {str(number): {name: float(value) for name, value in scores.items()} for number, scores in done}
    except (UserError, LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UserError(
            f"{file} is damaged. Delete it: finished folds are evaluated again, not trained again."
        ) from error


def _write(run: Path, done: dict[str, Scores]) -> None:
    """Writes `folds.csv` and then `folds.json`, from which an interrupted cross-validation resumes."""
    document = {"folds": done} | averages(done)
    file = Run(run).folds_file
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["fold", *document["mean"]])
    for label, scores in (done | averages(done)).items():
        writer.writerow([label, *(scores[name] for name in document["mean"])])
    write_text(file.with_suffix(".csv"), text.getvalue())
    write_text(file, json.dumps(document, indent=2) + "\n")
