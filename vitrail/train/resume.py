"""Resuming a run with its own configuration, except for the settings that may change."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from vitrail.config import TrainConfig, Verb, coerce, flat, override, save_yaml
from vitrail.data import Source, full_name
from vitrail.device import choose_device
from vitrail.errors import UserError
from vitrail.files import atomic_write
from vitrail.models import is_meant
from vitrail.progress import log
from vitrail.runs.run import Run
from vitrail.train.resolve import check

# Settings that do not affect the result: they may change on resume.
_FREE_ON_RESUME = {"device", "workers", "save_minutes", "data_dir", "cache_gb", "shard"}


def reopen(
    run: Path, source: Source | None, asked: Mapping[str, object], verb: Verb = "train"
) -> tuple[Path, TrainConfig]:
    """The folder and configuration of a run to resume; the user's settings must agree with it."""
    opened = Run.open(run)
    config = opened.config
    if opened.verb != verb:
        raise UserError(f"{run} was started by `vitrail {opened.verb}`. Use `{opened.resume_command}`.")
    _check_objects(opened, asked.get("python"))
    asked = dict(asked)
    config, saved = extended(opened, asked), flat(config)
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
        extends = "epochs" in asked and not opened.has_folds and config.optim.time_budget is None
        hint = " A finished run can be extended with more --epochs." if extends else ""
        raise UserError(
            f"A run resumes with the settings it was started with, but this asks for {', '.join(changed)}. "
            f"Remove that, or start a new run with `--weights {run}`.{hint}"
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


def save_extended(run: Path, config: TrainConfig) -> None:
    """Saves the configuration of a run that is extended, and logs that it is."""
    before, after = Run(run).config.stop.restarts, config.stop.restarts
    if after is None or after == before:
        return
    with atomic_write(Run(run).config_file) as path:
        save_yaml(config, path, Run.origin(config))
    log.info(
        f"Extending {run} from {after[-1]:g} to {config.optim.epochs:g} epochs: the learning rate warms up to "
        f"{config.optim.lr:g} and decays anew."
    )


def extended(run: Run, asked: dict[str, object]) -> TrainConfig:
    """The configuration of a run; a finished one with more epochs, if these are in `asked`, from which they are taken.

    The learning rate has decayed, so the added epochs get a warm-up and a decay of their own.
    """
    config = run.config
    epochs = coerce(TrainConfig, "epochs", asked["epochs"]) if "epochs" in asked else config.optim.epochs
    if epochs == config.optim.epochs:
        return config
    if run.has_folds or config.optim.time_budget is not None or not run.finished:
        return config  # refused below
    rows = run.history
    done = config.optim.epochs if run.used_up else rows[-1]["step"] / rows[0]["step"]
    if epochs <= done:
        raise UserError(f"{run.path} already has {done:g} epochs. Give more: --epochs {2 * done:g}")
    del asked["epochs"]
    return override(config, {"epochs": epochs, "restarts": (*(config.stop.restarts or ()), done)})
