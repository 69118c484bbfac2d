"""Checkpoints from which a run goes on exactly: one file, `last/state.pt`, whole or not there.

Nothing random needs saving: every batch, augmentation and dropout mask is drawn from (seed, step), so the step
number is the state of the sampler and of every generator.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from vitrail.errors import UserError
from vitrail.files import atomic_write


class Stateful(Protocol):
    """Models, optimisers and scalers: whatever can say its state and be put back into it."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


def save_checkpoint(run: Path, state: dict[str, Any]) -> None:
    """Replaces the run's checkpoint; on any failure the earlier one survives."""
    path = checkpoint_path(run)
    path.parent.mkdir(exist_ok=True)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    with atomic_write(path) as temporary:
        temporary.write_bytes(buffer.getbuffer())


def load_checkpoint(run: Path, device: str) -> dict[str, Any] | None:
    """The run's last checkpoint, or None before the first; never executes code from the file."""
    path = checkpoint_path(run)
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # a damaged file makes torch raise nearly every kind of exception
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(
            f"The checkpoint {path} is corrupt: {reason}. Delete it to begin the run again, or "
            f"start a new run from the best weights so far with `--weights {run}`."
        ) from error
    return state


def restore_parts(run: Path, state: dict[str, Any], parts: Mapping[str, Stateful]) -> dict[str, Any]:
    """Gives every part of a run the state that it had in the checkpoint; returns the checkpoint."""
    try:
        for name, part in parts.items():
            part.load_state_dict(state[name])
    except (RuntimeError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"The checkpoint {checkpoint_path(run)} does not belong to the model of this run.") from error
    return state


def checkpoint_path(run: Path) -> Path:
    return run / "last" / "state.pt"
