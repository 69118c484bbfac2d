"""Checkpoints: one file, `last/state.pt`, replaced atomically, from which a run resumes exactly.

No generator state is saved: batches, augmentation and dropout masks are drawn from (seed, step), so the step number is
the state of the sampler and of all generators.

Sharded tensors are in a folder beside it, to which each process writes its own (`vitrail/world/shards.py`). The file
names the folder, so that both are replaced at once.

Most of the time of a checkpoint is spent on the disk. So training waits only until the state is copied, and a thread
writes the copy.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, cast
from uuid import uuid4

import torch
from torch.optim import SGD, AdamW, Optimizer

from vitrail.data.identity import differences
from vitrail.data.npy import check_zip
from vitrail.errors import UserError, first_line
from vitrail.files import atomic_write, flush_folder, open_regular
from vitrail.progress import log
from vitrail.runs.run import Run
from vitrail.train.lamb import Lamb
from vitrail.train.muon import Muon
from vitrail.train.progress import Progress
from vitrail.world import world

# The tensors that each optimiser keeps for a parameter.
_STATES: dict[type[Optimizer], tuple[str, ...]] = {
    SGD: ("momentum_buffer",),
    AdamW: ("exp_avg", "exp_avg_sq"),
    Lamb: ("mean", "square"),
    Muon: ("momentum_buffer",),
}


class Stateful(Protocol):
    """Anything with a state to save and restore, such as a model or an optimiser."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


class Checkpoints:
    """A context that writes a run's checkpoints while training goes on. At its end, the last one is written."""

    def __init__(self, run: Path):
        self._run = run
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="vitrail-save")
        self._writing: Future[Any] | None = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._pool.shutdown()
        if error is None:
            self.wait()

    def save(self, state: dict[str, Any]) -> None:
        """Copies the state, for threads to write, once the checkpoint before is written. Called by every process."""
        self.wait()
        folder = checkpoint_path(self._run).parent
        if world().first():
            _make(folder)
        folder /= world().every(f"shards-{uuid4().hex[:8]}")[0]
        self._writing = shards = world().save_shards(state, folder)
        if world().first():
            buffer = io.BytesIO()
            torch.save(world().saved(state) | ({"shards": folder.name} if shards else {}), buffer)
            self._writing = self._pool.submit(_write, self._run, buffer, folder, shards)

    def wait(self) -> None:
        """Waits until the last checkpoint is written; raises its error."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()


def _make(folder: Path) -> None:
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        if folder.exists():
            raise UserError(f"{folder} must be a folder, for checkpoints, but it is a file. Remove it.") from error
        raise UserError(f"{folder} cannot be created: {error.strerror}. Free some space.") from error


def _write(run: Path, buffer: io.BytesIO, folder: Path, shards: Future[Any] | None) -> None:
    """Replaces the run's checkpoint atomically, once all shards are in the folder; on failure the previous survives."""
    if shards is not None:
        shards.result()
        flush_folder(folder)
    path = checkpoint_path(run)
    with atomic_write(path) as temporary:
        temporary.write_bytes(buffer.getbuffer())
    for other in path.parent.glob("shards-*"):
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)


def load_checkpoint(run: Path, device: str, parts: Mapping[str, Stateful] | None = None) -> dict[str, Any] | None:
    """The run's last checkpoint, or None; never executes code from the file.

    Its tensors are whole, except for those of `parts` that are sharded.
    """
    path = checkpoint_path(run)
    if not path.exists():
        return None
    try:
        with open_regular(path) as file:
            check_zip(path, 1, 2**26, "checkpoints")  # torch does not compress them
            state: Any = torch.load(file, map_location=device, weights_only=True)
        if not isinstance(state, dict):
            raise TypeError(f"it is a {type(state).__name__}")
        if "shards" in state:
            from vitrail.world.shards import fill  # loads much of torch.distributed

            path = path.parent / str(state.pop("shards"))
            state = fill(state, path, world().layout(parts or {}))
    except Exception as error:  # torch raises many types for damaged files
        raise UserError(
            f"The checkpoint {path} is corrupt: {first_line(error)}. Delete {checkpoint_path(run).parent} to restart "
            f"the run, or start a new run from the weights kept so far with `--weights {run}`."
        ) from error
    return cast(dict[str, Any], state)


def resume(
    run: Path,
    device: str,
    parts: Mapping[str, Stateful],
    progress: Progress,
    data: dict[str, Any],
    data_changed: bool = False,
) -> None:
    """Restores a run from its last checkpoint, if there is one; `progress` is one of its parts."""
    if (state := load_checkpoint(run, device, parts)) is not None:
        _restore(run, state, parts, data, data_changed)
        log.info(f"Resuming after step {progress.step}.")
    if len({*world().every(progress.step)}) > 1:
        raise UserError(
            f"The machines have different checkpoints of {run}. It must be on a file system that all of them share."
        )


def _restore(
    run: Path, state: dict[str, Any], parts: Mapping[str, Stateful], data: dict[str, Any], data_changed: bool = False
) -> None:
    """Restores a run from a checkpoint; `data` is the identity of the data, which `data_changed` allows to differ."""
    wrong = "does not match the model of this run"
    try:
        changed = differences(state["data"], data)
        if not changed or data_changed:
            for name, part in parts.items():
                world().load(part, state[name])
                if isinstance(part, Optimizer):
                    _check_fits(part)
    except UserError:
        raise
    except Exception as error:  # a damaged file may contain anything
        raise UserError(f"The checkpoint {checkpoint_path(run)} {wrong}. Delete it to restart the run.") from error
    if changed and not data_changed:
        raise UserError(
            f"The data has changed since the run began: {', '.join(changed)}. Restore the data, go on with "
            f"--data-changed, or start a new run with `--weights {run}`."
        )
    if changed:
        log.warning(f"The data has changed since the run began: {', '.join(changed)}.")


def _check_fits(optimizer: Optimizer) -> None:
    """Raises ValueError if the state of an optimiser does not fit its parameters, which torch does not check.

    An optimiser of the caller's own may have a state of any shape.
    """
    for p, state in optimizer.state.items():
        for name in _STATES.get(type(optimizer), ()):
            if state[name] is not None and state[name].shape != p.shape:
                raise ValueError(f"{name} has the shape {tuple(state[name].shape)}")


def checkpoint_path(run: Path) -> Path:
    return Run(run).checkpoint_file
