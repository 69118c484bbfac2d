"""Checkpoints: one file, `last/state.pt`, replaced atomically, from which a run resumes exactly.

No generator state is saved: batches, augmentation and dropout masks are drawn from (seed, step), so the step number is
the state of the sampler and of all generators.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from vitrail.errors import UserError
from vitrail.files import atomic_write
from vitrail.runs.run import Run


class Stateful(Protocol):
    """Anything with a state to save and restore, such as a model or an optimiser."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


def save_checkpoint(run: Path, state: dict[str, Any]) -> None:
    """Replaces the run's checkpoint atomically; on failure the previous one survives."""
    path = checkpoint_path(run)
    path.parent.mkdir(exist_ok=True)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    with atomic_write(path) as temporary:
        temporary.write_bytes(buffer.getbuffer())


def load_checkpoint(run: Path, device: str) -> dict[str, Any] | None:
    """The run's last checkpoint, or None; never executes code from the file."""
    path = checkpoint_path(run)
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # torch raises many types for damaged files
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(
            f"The checkpoint {path} is corrupt: {reason}. Delete it to restart the run, or start a new run from the "
            f"weights kept so far with `--weights {run}`."
        ) from error
    return state


def restore_checkpoint(run: Path, state: dict[str, Any], parts: Mapping[str, Stateful], data: str) -> None:
    """Restores a run from a checkpoint; `data` is the current fingerprint of the data set."""
    try:
        changed = state["data"] != data
        for name, part in parts.items():
            part.load_state_dict(state[name])
    except (RuntimeError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"The checkpoint {checkpoint_path(run)} does not match the model of this run. Delete it to restart the run."
        ) from error
    if changed:
        raise UserError(
            "The data has changed since the run began: other images, labels or classes. Restore the data, or start a "
            f"new run with `--weights {run}`."
        )


def checkpoint_path(run: Path) -> Path:
    return Run(run).checkpoint_file
