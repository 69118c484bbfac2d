"""`vitrail train`: trains a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

from vitrail.errors import UserError

if TYPE_CHECKING:
    from vitrail.plan.estimate import Plan


@overload
def train(
    data: str | Path | None = None,
    *,
    resume: str | Path | None = None,
    overwrite: bool = False,
    find_lr: bool = False,
    config: str | Path | None = None,
    plan: Literal[True],
    **settings: object,
) -> Plan: ...


@overload
def train(
    data: str | Path | None = None,
    *,
    resume: str | Path | None = None,
    overwrite: bool = False,
    find_lr: bool = False,
    config: str | Path | None = None,
    plan: Literal[False] = False,
    **settings: object,
) -> Path: ...


def train(
    data: str | Path | None = None,
    *,
    resume: str | Path | None = None,
    overwrite: bool = False,
    find_lr: bool = False,
    config: str | Path | None = None,
    plan: bool = False,
    **settings: object,
) -> Path | Plan:
    """Train a model on a data set and evaluate it. Options that are not given are chosen by the recipe.

    Returns the run folder; the command also writes its report. With --folds the folder holds one run per fold, and the
    mean and standard deviation of their scores. With --find-lr it holds lr.png and lr.json.

    Args:
        data: folder, .npz or .npy file, CSV/TSV/Parquet table, tar shards, hf:NAME or built-in data set
        resume (RUN): continue this run from its last checkpoint
        overwrite: replace an existing run of the same name
        find_lr: run a learning-rate range test instead of training
        config (FILE): YAML file of settings, such as the config.yaml of a run; flags override it
        plan: print the memory and time of the run instead of training
        **settings: every option of `vitrail.config.TrainConfig`, by its flat name
    """
    from vitrail.train import folds
    from vitrail.train.config_file import with_file
    from vitrail.train.start import start

    if config is not None:
        data, settings = with_file(Path(config), data, resume, settings)
    source, run = None if data is None else str(data), None if resume is None else str(resume)
    if plan:
        from vitrail.plan.settings import plan_run

        return plan_run(source, run, settings)
    if folds.wanted(resume, settings) and not find_lr:
        return folds.train(source, run, overwrite, settings)
    return start(source, run, overwrite, find_lr, settings)


def show(run: Path | Plan, *, find_lr: bool = False) -> int:
    """Write the report of the run. A failure is only logged: the run itself is complete."""
    from vitrail.progress import log
    from vitrail.verbs.plan import show as show_plan
    from vitrail.verbs.report import report

    if not isinstance(run, Path):
        return show_plan(run)
    if find_lr:
        return 0
    try:
        log.info(f"The report is {report(run)}")
    except Exception as error:
        why = error if isinstance(error, UserError) else f"{type(error).__name__}: {error}."
        log.warning(f"The run is complete, but its report failed: {why} Try again: vitrail report {run} --debug")
    return 0
