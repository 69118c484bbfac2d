"""Cross-validation: one run for every fold of the data, and what they reach on average.

The folder of all folds has a `config.yaml` as a run has, with `fold: 0`; the folds are ordinary runs in it that differ
in their number alone. `folds.json` tells which are done, so that whatever was interrupted can go on.
"""

from __future__ import annotations

import csv
import io
import json
import statistics
from pathlib import Path
from typing import Any

from vitrail.config import TrainConfig, flat, load_yaml, override
from vitrail.data import full_name, open_data
from vitrail.errors import UserError
from vitrail.files import write_text
from vitrail.progress import log, log_to_console
from vitrail.train.loop import complete, given, plan, prepare
from vitrail.train.run import CONFIG_FILE, create_run, reopen, split_settings

Scores = dict[str, float]  # "val_top1", "val_loss", "test_top1", …


def wanted(resume: str | Path | None, asked: dict[str, Any]) -> bool:
    """Whether a call asks for all folds, and not for a single run."""
    if resume is not None and (file := Path(resume) / CONFIG_FILE).exists():
        config = load_yaml(TrainConfig, file)
        return config.source.folds > 0 and config.source.fold == 0
    return bool(asked.get("folds")) and not asked.get("fold")


def train(source: str | None, resume: str | None, overwrite: bool, asked: dict[str, Any]) -> Path:
    """Trains every fold that is not done yet; returns the folder that holds them."""
    log_to_console()
    asked = given(asked)
    if resume is not None:
        run, config = reopen(Path(resume), source, asked)
    elif source is not None:
        data = open_data(source, **split_settings(asked | {"fold": 1}))
        config = plan(full_name(source), data, asked)
        prepare(config, data)  # whatever can be refused is refused before there is a folder
        run = create_run(config, overwrite)
    else:
        raise UserError("There is nothing to train on: give a data set, or --resume RUN to go on with a run.")

    done = _read(run)
    try:
        for number in range(1, config.source.folds + 1):
            if str(number) not in done:
                log.info(f"Fold {number} of {config.source.folds}:")
                done[str(number)] = _train_fold(run, override(config, {"fold": number}))
                _write(run, done)
    except KeyboardInterrupt:
        log.info(f"To go on with this fold and those after it: vitrail train --resume {run}")
        raise
    log.info(table(done))
    log.info(f"The folds are in {run}.")
    return run


def _train_fold(run: Path, config: TrainConfig) -> Scores:
    """Begins a fold, or goes on with it if it has begun."""
    config = override(config, {"out": str(run), "name": f"fold{config.source.fold}"})
    data = open_data(config.data, **split_settings(flat(config)))
    model, notes = prepare(config, data)
    folder = run / config.run.name
    if not (folder / CONFIG_FILE).exists():
        create_run(config, overwrite=False)
    measured = complete(folder, config, data, model, notes)
    return {
        f"{split}_{name}": value
        for split, metrics in measured.items()
        for name, value in metrics.summary().items()
        if name != "images"
    }


def averages(done: dict[str, Scores]) -> dict[str, Scores]:
    """The mean of every score over the folds, and its sample standard deviation."""
    columns = {name: [scores[name] for scores in done.values()] for name in next(iter(done.values()))}
    means = {name: statistics.fmean(values) for name, values in columns.items()}
    spreads = {name: statistics.stdev(values) if len(values) > 1 else 0.0 for name, values in columns.items()}
    return {"mean": means, "std": spreads}


def table(done: dict[str, Scores]) -> str:
    """The folds for people: a line for each, then the mean and the standard deviation."""
    names = list(next(iter(done.values())))
    width = max(map(len, names)) + 2
    lines = ["fold  " + "".join(name.replace("_", " ").rjust(width) for name in names)]
    for label, scores in (done | averages(done)).items():
        lines.append(f"{label:<6}" + "".join(f"{scores[name]:>{width}.4f}" for name in names))
    return "\n".join(lines)


def _read(run: Path) -> dict[str, Scores]:
    """The scores of the folds that are done, by their numbers."""
    file = run / "folds.json"
    if not file.exists():
        return {}
    try:
        return dict(json.loads(file.read_text(encoding="utf-8"))["folds"])
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"{file} is damaged. Delete it: folds that are done are measured again, not trained."
        ) from error


def _write(run: Path, done: dict[str, Scores]) -> None:
    """`folds.json` and `folds.csv`, with all folds that are done."""
    document = {"folds": done} | averages(done)
    write_text(run / "folds.json", json.dumps(document, indent=2) + "\n")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["fold", *document["mean"]])
    writer.writerows([label, *scores.values()] for label, scores in (done | averages(done)).items())
    write_text(run / "folds.csv", text.getvalue())
