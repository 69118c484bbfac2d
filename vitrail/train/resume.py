"""Resuming a run with its own configuration, except for the settings that may change."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from vitrail.config import TrainConfig, Verb, coerce, flat, override
from vitrail.data import Source, full_name
from vitrail.device import choose_device
from vitrail.errors import UserError
from vitrail.models import is_meant
from vitrail.runs.run import Run
from vitrail.train.resolve import check

# Settings that do not affect the result: they may change on resume.
_FREE_ON_RESUME = {"device", "workers", "save_minutes", "data_dir", "cache_gb"}


def reopen(
    run: Path, source: Source | None, asked: Mapping[str, object], verb: Verb = "train"
) -> tuple[Path, TrainConfig]:
    """The folder and configuration of a run to resume; the user's settings must agree with it."""
    opened = Run.open(run)
    config = opened.config
    if opened.verb != verb:
        raise UserError(f"{run} was started by `vitrail {opened.verb}`. Use `{opened.resume_command}`.")
    saved = flat(config)
    _check_objects(opened, asked.get("python"))
    changed = []
    for name, value in {**asked, **({} if source is None else {"data": full_name(source)})}.items():
        if name == "python" or name in (saved["python"] or ()):
            continue  # an object; the checkpoint knows the data's fingerprint
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
            f"A run resumes with the settings it was started with, but this asks for {', '.join(changed)}. "
            f"Remove that, or start a new run with `--weights {run}`."
        )
    choose_device(config.run.device)
    return run, check(config)


def _check_objects(run: Run, given: object) -> None:
    """Raises UserError if the objects given are not those that the run was started with."""
    started, now = ({*names} if isinstance(names, tuple) else set() for names in (run.config.python, given))
    if started == now:
        return
    missing, new = sorted(started - now), sorted(now - started)
    if missing:
        raise UserError(
            f"{run.path} was started with Python objects, which are not stored: {', '.join(missing)}. Give them again: "
            f"{run.resume_command}"
        )
    raise UserError(f"{run.path} was started without {', '.join(new)} from Python. Remove that, or start a new run.")
