"""The time that a list of runs takes on this machine, and the length of runs that fits a budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vitrail.config import Duration, TrainConfig, TransferConfig, options
from vitrail.config.splits import split_settings
from vitrail.data import Data, open_data
from vitrail.errors import UserError
from vitrail.progress import without_info
from vitrail.studies.study import Job
from vitrail.train.pace import images_per_second
from vitrail.train.resolve import resolve, typed
from vitrail.train.start import HELD_OUT

_OVERHEAD = 1.5  # seconds of a run besides training: start, calibration, figures
_PROBE = 1.5  # seconds of a probe besides its features
_SLACK = 1.1  # reading images, saving, others on the machine
_STEPS = 20  # least optimiser steps of a full run
_MEASURED = 0.4  # seconds that a speed is measured
# Settings that do not change the speed.
_FREE = {"seed", "epochs", "lr", "warmup_epochs", "min_lr", "smoothing", "weight_decay", "body_lr", "layer_decay"}


_ARCHITECTURE = ("model", "img_size", "stem", "pool", "pos", "attention")


class Clock:
    """Estimates the time of runs; the speed of each kind of run is measured once."""

    def __init__(self, device: str | None) -> None:
        self._device = device
        self._rates: dict[str, float] = {}
        self._data: dict[str, Data] = {}

    def seconds(self, jobs: Sequence[Job]) -> list[float]:
        """The estimated time of each run."""
        by_name = {job.name: job for job in jobs}
        return [self._time(job, by_name) for job in jobs]

    def _time(self, job: Job, jobs: dict[str, Job]) -> float:
        data, kind = self._open(job.data, job.method), self.kind(job, jobs)
        if kind not in self._rates:
            self._rates[kind] = images_per_second(self.config(job, jobs), data, seconds=_MEASURED)
        train, val = len(data.splits["train"]), len(data.splits["val"])
        seen = job.epochs * train + max(job.epochs, 1) * val / 3
        seen += 0 if job.method else (val + (0 if job.tuning else len(data.splits["test"]))) / 3
        for source in dict.fromkeys(source for source, _ in job.probes):
            splits = self._open(source).splits
            seen += (len(splits["train"]) + len(splits["test"])) / 3
        return _SLACK * seen / self._rates[kind] + _OVERHEAD + _PROBE * len(job.probes)

    def kind(self, job: Job, jobs: dict[str, Job]) -> str:
        """What the speed of a run depends on."""
        settings = _settings(job, jobs, self._device)
        telling = {name: value for name, value in settings.items() if name not in _FREE}
        data = self._open(job.data, job.method)
        return repr((sorted(telling.items()), job.method, data.size, data.channels, len(data.classes)))

    def config(self, job: Job, jobs: dict[str, Job]) -> TrainConfig:
        """The configuration of a run; raises UserError for settings that cannot be."""
        asked = typed(_settings(job, jobs, self._device), "pretrain" if job.method else "train")
        return resolve(job.data, self._open(job.data, job.method), asked)

    def _open(self, source: str, method: str = "") -> Data:
        key = f"{source} {method}"
        if key not in self._data:
            how: dict[str, Any] = {"task": method, "val_fraction": HELD_OUT} if method else {}
            with without_info():  # files that the study has made
                self._data[key] = open_data(source, **split_settings(how))
        return self._data[key]


def check_jobs(jobs: Sequence[Job], device: str | None) -> None:
    """Raises UserError for a run with settings that cannot be; those that differ in a number only are checked once."""
    by_name, clock = {job.name: job for job in jobs}, Clock(device)
    for job in {clock.kind(job, by_name): job for job in jobs}.values():
        clock.config(job, by_name)


def _settings(job: Job, jobs: dict[str, Job], device: str | None) -> dict[str, Any]:
    """The settings of a run as if it started from scratch, so that they can be resolved before its weights exist."""
    settings: dict[str, Any] = {**job.settings, "epochs": max(job.epochs, 0.01), "name": "study"}
    if device is not None:
        settings["device"] = device
    origin = job
    while origin.weights is not None:
        origin = jobs[origin.weights]
        own = {name: origin.settings[name] for name in _ARCHITECTURE if name in origin.settings}
        settings = own | {name: value for name, value in settings.items() if name not in options(TransferConfig)}
    return settings


def fitting(budget: float, least: int, total: Callable[[int], float], name: str, runs: int) -> int:
    """The images of a full run with which all runs fit a budget; their time is linear in it."""
    few, many = least, 4 * least
    low, high = total(few), total(many)
    each = (high - low) / (many - few)
    images = int(few + (budget - low) / each) if each > 0 else many
    if images < least:
        raise UserError(
            f"A budget of {Duration(budget)} is too small: the {runs} runs of '{name}' take at least {Duration(low)} "
            "here. Give a larger --budget, or fewer --seeds."
        )
    return images


def least_images(batch: int) -> int:
    """The images of the shortest full run."""
    return _STEPS * batch
