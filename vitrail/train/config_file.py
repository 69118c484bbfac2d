"""Settings from a YAML file: the `config.yaml` of a run, or flat names as on the command line."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from vitrail.config import TrainConfig, coerce, modern, read_yaml
from vitrail.data import Source
from vitrail.errors import UserError, shown
from vitrail.files import free_name


def read_settings(path: Path) -> dict[str, Any]:
    """The settings of a file by flat name, without those that are null.

    A run's time budget also has the epochs that it was planned with: they are left out, since either sets the length.
    """
    document = modern(read_yaml(path))
    if not isinstance(document, dict):
        raise UserError(f"{path} must contain settings, such as `epochs: 30`, but it contains {shown(document)}.")
    found: dict[str, Any] = {}
    for name, value in document.items():
        found |= value if isinstance(value, dict) else {name: value}
    settings = {str(name).replace("-", "_"): value for name, value in found.items() if value is not None}
    settings.pop("python", None)  # objects are given again
    if "time_budget" in settings:
        settings.pop("epochs", None)
    try:
        for name, value in settings.items():
            if not (name in ("amp", "device") and isinstance(value, bool | int)):  # read as people say them
                coerce(TrainConfig, name, value)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return settings


def with_file(
    path: Path, data: Source | None, resume: str | PathLike[str] | None, asked: Mapping[str, Any]
) -> tuple[Source | None, dict[str, Any]]:
    """The data and the settings of a file, overridden by the user's. If its run exists, the name gets a number."""
    if resume is not None:
        raise UserError("A run resumes with the settings it was started with. Remove --config.")
    settings = read_settings(path) | dict(asked)
    if {"epochs", "time_budget"} <= settings.keys() and "epochs" in asked:
        del settings["time_budget"]
    if "name" in settings and "name" not in asked:
        folder, name = Path(settings.get("out", "runs")), str(settings["name"])
        settings["name"] = free_name(folder, name)
    return settings.pop("data", None) if data is None else data, {
        name: value for name, value in settings.items() if name != "data"
    }
