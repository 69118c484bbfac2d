"""Finds the file of weights: a run folder, a path or a hub name, and opens its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitrail.config import CONFIG_FILE
from vitrail.errors import UserError
from vitrail.weights import hub
from vitrail.weights.card import WEIGHTS_FILE
from vitrail.weights.sharded import INDEXES, is_index, open_sharded
from vitrail.weights.tensors import SUFFIXES, Tensors, from_state_dict, open_tensors

Source = str | Path | Mapping[str, Any]  # a run, a file, a hub name, or a state dict

_IN_FOLDERS = (WEIGHTS_FILE, INDEXES[0], "pytorch_model.bin", INDEXES[1])  # in order of preference


def locate(source: str | Path) -> Path:
    """The weights file of a run folder, a path or a hub name."""
    if hub.is_hub(str(source)):
        return hub.fetch(str(source))
    path = Path(source)
    try:
        if path.is_dir():
            path = next((path / name for name in _IN_FOLDERS if (path / name).exists()), path / WEIGHTS_FILE)
            if not path.exists() and (path.parent / CONFIG_FILE).exists():
                raise UserError(
                    f"The run {path.parent} has no {WEIGHTS_FILE} yet: its first epoch is not finished. "
                    "Continue it with --resume."
                )
        if not path.exists():
            raise UserError(f"{source} is neither a run folder nor a weights file: {path} does not exist.")
    except OSError as error:  # a folder without permission, or a name that is too long
        raise UserError(f"{str(source)[:80]} cannot be opened: {error.strerror}.") from error
    if path.suffix not in SUFFIXES and not is_index(path):
        if path.suffix.lower() in (".onnx", ".xml"):
            raise UserError(f"{path} is an exported file, which only predicts. Use the run that it was exported from.")
        raise UserError(f"Weights must be a run folder or a {', '.join(SUFFIXES)} file, but {path} is neither.")
    return path


def home(source: str | Path) -> Path:
    """The folder for results of a model: its own, or the current one for hub models."""
    return Path() if hub.is_hub(str(source)) else locate(source).parent


def absolute(source: str) -> str:
    """A source that can be found from any folder."""
    return hub.full_name(source) if hub.is_hub(source) else str(Path(source).expanduser().resolve())


def open_source(source: Source, first: str = "") -> tuple[str, Path | None, Tensors]:
    """The name of a source, its file (None for a state dict), and its tensors.

    `first` is the key to prefer in a checkpoint with several models.
    """
    if isinstance(source, Mapping):
        return "The state dict", None, from_state_dict(source, "The state dict", first)
    path = locate(source)
    return str(path), path, open_sharded(path) if is_index(path) else open_tensors(path, first)
