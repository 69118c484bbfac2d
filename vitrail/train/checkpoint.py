"""Checkpoints from which a run goes on exactly: one file, `last/state.pt`, whole or not there.

Nothing random needs saving: every batch, augmentation and dropout mask is drawn from (seed, step), so the step
number is the state of the sampler and of every generator.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch

from vitrail.errors import UserError
from vitrail.weights.files import replacing


def save_checkpoint(run: Path, state: dict[str, Any]) -> None:
    """Replaces the run's checkpoint; on any failure the earlier one survives."""
    path = checkpoint_path(run)
    path.parent.mkdir(exist_ok=True)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    with replacing(path) as temporary:
        temporary.write_bytes(buffer.getbuffer())


def load_checkpoint(run: Path, device: str) -> dict[str, Any] | None:
    """The run's last checkpoint, or None before the first; never executes code from the file."""
    path = checkpoint_path(run)
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, OSError, ValueError) as error:
        raise UserError(
            f"The checkpoint {path} is corrupt: {str(error).splitlines()[0]}. Delete it to begin the run again, or "
            f"start a new run from the best weights so far with `--weights {run}`."
        ) from error
    return state


def checkpoint_path(run: Path) -> Path:
    return run / "last" / "state.pt"
