"""`vitrail train`: trains a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.errors import UserError

if TYPE_CHECKING:
    from vitrail.verbs.run import Run


def train(
    data: str | Path | None = None,
    *,
    resume: str | Path | None = None,
    overwrite: bool = False,
    find_lr: bool = False,
    **settings: object,
) -> Run:
    """Train a model on a data set, evaluate it and write a report. Options not given are chosen by the recipe.

    Returns the run, which can be used as the path of its folder. With --folds the folder holds one run per fold, and
    the mean and standard deviation of their scores. With --find-lr it holds lr.png and lr.json.

    Args:
        data: folder, .npz or .npy file, CSV/TSV/Parquet table, tar shards, hf:NAME or built-in data set
        resume (RUN): continue this run from its last checkpoint
        overwrite: replace an existing run of the same name
        find_lr: run a learning-rate range test instead of training
        **settings: every option of `vitrail.config.TrainConfig`, by its flat name
    """
    from vitrail.train import folds
    from vitrail.train.start import start
    from vitrail.verbs.run import Run

    source, run = None if data is None else str(data), None if resume is None else str(resume)
    if folds.wanted(resume, settings) and not find_lr:
        return reported(folds.train(source, run, overwrite, settings))
    if find_lr:
        return Run(start(source, run, overwrite, find_lr, settings))
    return reported(start(source, run, overwrite, find_lr, settings))


def reported(folder: Path) -> Run:
    """The run in a folder, with its report. A failure to write it is only logged: the run itself is complete."""
    from vitrail.progress import log
    from vitrail.verbs.run import Run

    run = Run(folder)
    try:
        log.info(f"The report is {run.report()}")
    except Exception as error:
        why = error if isinstance(error, UserError) else f"{type(error).__name__}: {error}."
        log.warning(f"The run is complete, but its report failed: {why} Try again: vitrail report {run} --debug")
    return run


def show(run: Run) -> int:  # noqa: ARG001  # training has logged everything
    """The run has been logged."""
    return 0
