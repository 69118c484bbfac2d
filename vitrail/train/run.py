"""A run folder: made once, never overwritten silently, reopened to resume."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitrail.config import TrainConfig, coerce, flat, load_yaml, override, save_yaml
from vitrail.data import Data, full_name
from vitrail.device import choose_device
from vitrail.errors import UserError
from vitrail.models import is_meant
from vitrail.train.resolve import check

CONFIG_FILE = "config.yaml"

# Settings that say how a run is carried out, not what it computes: they may change when it goes on.
_FREE_ON_RESUME = {"device", "workers", "save_minutes", "data_dir", "cache_gb"}


def create_run(config: TrainConfig, overwrite: bool) -> Path:
    """Makes the run folder and saves the configuration in it."""
    run = Path(config.run.out) / config.run.name
    if config.weights is not None and Path(config.weights).resolve().is_relative_to(run.resolve()):
        raise UserError(f"The weights {config.weights} lie in {run}, the run to make. Choose another --name.")
    teacher = config.distillation.teacher
    if teacher is not None and Path(teacher).resolve().is_relative_to(run.resolve()):
        raise UserError(f"The teacher {teacher} lies in {run}, the run to make. Choose another --name.")
    if run.exists() and overwrite:
        if not (run / CONFIG_FILE).exists():
            raise UserError(
                f"{run} exists and is no run of vitrail, so --overwrite leaves it alone. Choose another --name."
            )
        shutil.rmtree(run)
    try:
        run.mkdir(parents=True)
    except FileExistsError:
        raise UserError(
            f"The run {run} exists. Choose another --name, go on with `vitrail train --resume {run}`, "
            "or replace it with --overwrite."
        ) from None
    except OSError as error:
        raise UserError(f"The run folder {run} cannot be made: {error.strerror}. Choose another --out.") from error
    try:
        save_yaml(config, run / CONFIG_FILE)
    except OSError as error:
        shutil.rmtree(run)
        raise UserError(
            f"Could not write {run / CONFIG_FILE}: {error.strerror}. Make room or choose another --out."
        ) from error
    return run


def reopen(run: Path, source: str | None, asked: Mapping[str, object]) -> tuple[Path, TrainConfig]:
    """The configuration of a run that goes on; what was asked for must agree with it."""
    if not (run / CONFIG_FILE).exists():
        raise UserError(f"{run} is no run: it has no {CONFIG_FILE}. `--resume` takes the folder that training made.")
    config = load_yaml(TrainConfig, run / CONFIG_FILE)
    saved = flat(config)
    changed = []
    for name, value in {**asked, **({"data": full_name(source)} if source else {})}.items():
        value = coerce(TrainConfig, name, value)
        if name == "model":
            value = saved[name] if is_meant(saved[name], value) else value
        if name in _FREE_ON_RESUME:
            config = override(config, {name: value})
        elif value != saved[name]:
            new, old = (f"{x:g}" if type(x) is float else x for x in (value, saved[name]))
            changed.append(f"{name} {new} instead of {old}")
    if changed:
        raise UserError(
            f"A run goes on as it began, but this asks for {', '.join(changed)}. "
            f"Leave that out, or start a new run with `--weights {run}`."
        )
    choose_device(config.run.device)
    return run, check(config)


def split_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What of a configuration decides which images are in which split."""
    names = ("val_fraction", "folds", "fold", "seed", "data_dir", "image_column", "label_column", "task", "streaming")
    return {name: settings[name] for name in names if settings.get(name) is not None}


def fingerprint(data: Data) -> str:
    """Changes when the classes, the labels or the number of images of a data set change."""
    digest = hashlib.sha256("\n".join(data.classes).encode())
    for name, split in data.splits.items():
        digest.update(name.encode() + split.targets.tobytes())
    return digest.hexdigest()
