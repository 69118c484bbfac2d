"""`vitrail train`: trains a model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from vitrail.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from vitrail.data import Source
    from vitrail.plan.estimate import Plan
    from vitrail.runs import run as folders
    from vitrail.tasks.objective import Objective
    from vitrail.train.custom import Loss
    from vitrail.train.progress import Progress
    from vitrail.verbs.run import Run


@overload
def train(data: str | Path | Source | None = None, *, plan: Literal[True], **settings: Any) -> Plan: ...


@overload
def train(data: str | Path | Source | None = None, *, plan: Literal[False] = False, **settings: Any) -> Run: ...


def train(
    data: str | Path | Source | None = None,
    *,
    resume: str | PathLike[str] | None = None,
    overwrite: bool = False,
    data_changed: bool = False,
    find_lr: bool = False,
    config: str | Path | None = None,
    plan: bool = False,
    augment: Callable[[Tensor], Tensor] | None = None,
    objective: Loss | type[Objective] | None = None,
    optimizer: Callable[[list[dict[str, Any]]], Optimizer] | None = None,
    schedule: Callable[[float], float] | None = None,
    on_epoch: Callable[[Progress], object] | None = None,
    **settings: object,
) -> Run | Plan:
    """Train a model on a data set, evaluate it and write a report. Options not given are chosen by the recipe.

    Returns the run, which can be used as the path of its folder. With --folds the folder holds one run per fold, and
    the mean and standard deviation of their scores. With --find-lr it holds lr.png and lr.json.

    In Python, `data` and `val` may also be objects, `model` a module, and `augment`, `objective`, `optimizer`,
    `schedule` and `on_epoch` functions, see docs/extend.md.

    Args:
        data: folder, .npz or .npy file, CSV/TSV/Parquet table, tar shards, hf:NAME or built-in data set
        resume (RUN): continue this run from its last checkpoint
        overwrite: replace an existing run of the same name
        data_changed: with --resume, continue although the data has changed since the run began
        find_lr: run a learning-rate range test instead of training
        config (FILE): YAML file of settings, such as the config.yaml of a run; flags override it
        plan: print the memory and time of the run instead of training
        **settings: every option of `vitrail.config.TrainConfig`, by its flat name
    """
    from torch import nn

    from vitrail.train import folds
    from vitrail.train.config_file import with_file
    from vitrail.train.custom import Custom
    from vitrail.train.start import start
    from vitrail.verbs.run import Run

    if config is not None:
        data, settings = with_file(Path(config), data, resume, settings)
    module = settings.pop("model") if isinstance(settings.get("model"), nn.Module) else None
    if callable(settings.get("model")):
        raise UserError("'model' must be a name or a module, but it is a class or a function. Call it: model=Model().")
    custom = Custom(module, augment, objective, optimizer, schedule, on_epoch)  # type: ignore[arg-type]
    folder = None if resume is None else str(resume)
    if plan:
        from vitrail.plan.settings import plan_run

        return plan_run(data, folder, settings)
    if find_lr:
        return Run(start(data, folder, overwrite, find_lr, settings, custom))
    run = folds.train if folds.wanted(folder, settings) else partial(start, find_lr=False)
    given: dict[str, Any] = {"source": data, "resume": folder, "overwrite": overwrite, "asked": settings}
    return reported(run(**given, custom=custom, data_changed=data_changed))


def reported(trained: folders.Run) -> Run:
    """A run with its report. A failure to write it is only logged: the run itself is complete."""
    from vitrail.progress import log
    from vitrail.verbs.run import Run
    from vitrail.world import alone, world

    run = Run(trained)
    run.holds = trained.holds
    if not world().first():
        return run
    try:
        with alone():
            log.info(f"The report is {run.report()}")
    except Exception as error:
        why = error if isinstance(error, UserError) else f"{type(error).__name__}: {error}."
        log.warning(f"The run is complete, but its report failed: {why} Try again: vitrail report {run} --debug")
    return run


def show(result: Run | Plan) -> int:
    """Print a plan; a run has been logged."""
    from vitrail.verbs.plan import show as show_plan
    from vitrail.verbs.run import Run

    return 0 if isinstance(result, Run) else show_plan(result)
