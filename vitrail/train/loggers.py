"""Experiment trackers, each through its own client: Weights & Biases and MLflow (--log wandb,mlflow).

They log what metrics.csv has, epoch by epoch. Project, server and account are those of the client's own environment
variables, such as WANDB_PROJECT, WANDB_MODE, MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME. A resumed run continues in
the same place. If a tracker fails, the run goes on without it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Protocol

from vitrail.config import TrainConfig, flat
from vitrail.errors import UserError, nearest
from vitrail.files import read_json, write_text
from vitrail.progress import log
from vitrail.runs.run import Run

PROJECT = "vitrail"  # unless the environment names another


class Logger(Protocol):
    """A run in a tracker."""

    id: str  # by which the run is found again

    def epoch(self, number: int, values: Mapping[str, float]) -> None: ...

    def close(self, failed: bool) -> None: ...


class Wandb:
    """A run of Weights & Biases."""

    def __init__(self, run: Run, config: TrainConfig, known: str | None):
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.name,
            dir=str(run.path),
            id=known,
            resume="allow",
            config={name: _plain(value) for name, value in flat(config).items()},
        )
        self.id: str = self._run.id

    def epoch(self, number: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=number)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class Mlflow:
    """A run of MLflow."""

    def __init__(self, run: Run, config: TrainConfig, known: str | None):
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient()
        if known is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            experiment = self._client.get_experiment_by_name(name)
            number = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
            known = self._client.create_run(number, run_name=run.name).info.run_id
            settings = {name: _plain(value) for name, value in flat(config).items() if value is not None}
            self._client.log_batch(known, params=[Param(name, str(value)) for name, value in settings.items()])
        else:
            self._client.update_run(known, status="RUNNING")
        self.id: str = known

    def epoch(self, number: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._client.log_metric(self.id, name, value, step=number)

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self.id, "FAILED" if failed else "FINISHED")


LOGGERS: dict[str, Callable[[Run, TrainConfig, str | None], Logger]] = {"wandb": Wandb, "mlflow": Mlflow}
_ALWAYS = ("csv", "tensorboard")


def check_loggers(names: Sequence[str]) -> None:
    """Raises UserError for an unknown tracker, and for one whose client is not installed."""
    for name in names:
        if name not in (*LOGGERS, *_ALWAYS):
            known = ", ".join((*LOGGERS, *_ALWAYS))
            raise UserError(f"'log' must be among {known}, but it is '{name}'.{nearest(name, (*LOGGERS, *_ALWAYS))}")
        if name in LOGGERS and find_spec(name) is None:
            raise UserError(f"--log {name} needs the package {name}: pip install 'vitrail[{name}]'")


class Trackers:
    """The trackers of a run, which never stop it."""

    def __init__(self, run: Run, config: TrainConfig):
        self._loggers: dict[str, Logger] = {}
        known = read_json(run.trackers_file) if run.trackers_file.exists() else {}
        if not isinstance(known, dict):
            raise UserError(f"{run.trackers_file} must contain an object. Delete it: the trackers begin a new run.")
        for name in [name for name in config.run.log or () if name in LOGGERS]:
            try:
                self._loggers[name] = LOGGERS[name](run, config, known.get(name))
            except Exception as error:  # noqa: PERF203  # clients raise anything: no network, no account
                log.warning(f"--log {name} failed, and the run goes on without it: {_reason(error)}.")
        if self._loggers:
            ids = {name: logger.id for name, logger in self._loggers.items()}
            write_text(run.trackers_file, json.dumps(known | ids, indent=2) + "\n")

    def epoch(self, number: int, values: Mapping[str, float]) -> None:
        """Logs the values of an epoch."""
        self._each(lambda logger: logger.epoch(number, values))

    def close(self, failed: bool) -> None:
        """Marks the run as finished or failed."""
        self._each(lambda logger: logger.close(failed))

    def _each(self, act: Callable[[Logger], None]) -> None:
        for name, logger in list(self._loggers.items()):
            try:
                act(logger)
            except Exception as error:  # noqa: PERF203  # as above
                log.warning(f"--log {name} failed, and the run goes on without it: {_reason(error)}.")
                del self._loggers[name]


def _plain(value: object) -> object:
    return value if isinstance(value, int | float | bool | None) else str(value)


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
