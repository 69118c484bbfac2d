"""The sharded tensors of a checkpoint, of which each process has written its own part.

They are safetensors files in a folder beside the checkpoint, written and read by PyTorch's distributed checkpoints. In
the checkpoint itself they are tensors on the meta device: a shape without values.
"""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from vitrail.errors import UserError, first_line
from vitrail.files import open_regular
from vitrail.world.tensors import mapped

_FOLDER = re.compile(r"shards-[0-9a-f]{8}")


def write(shards: dict[str, Tensor], folder: Path, group: ProcessGroup) -> Future[None]:
    """Begins to write the shards that this process has; all processes of the group do."""
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    writing: Any = async_save(shards, storage_writer=writer, process_group=group)
    written: Future[None] = Future()
    writing.add_done_callback(lambda done: _settle(written, done.exception(), folder))
    return written


def _settle(written: Future[Any], error: BaseException | None, folder: Path) -> None:
    """Ends the writing of shards, with an error in plain words."""
    if error is not None:
        shutil.rmtree(folder, ignore_errors=True)
    if isinstance(error, CheckpointException):
        error = UserError(
            f"Could not write {folder}: {_reason(error)}. The checkpoint before is unchanged. Free some space or "
            "choose another folder."
        )
    if error is None:
        written.set_result(None)
    else:
        written.set_exception(error)


def _reason(error: CheckpointException) -> str:
    """Why a process failed: the error is no Exception, and its message has the traceback of every process."""
    first = next(iter(error.failures.values()))[0]
    return getattr(first, "strerror", None) or first_line(first)


def fill(state: Any, folder: Path, layout: Mapping[str, Tensor]) -> Any:
    """The state of a checkpoint with the values of its sharded tensors: whole, or the shards that `layout` asks for.

    Raises ValueError or OSError for a folder that does not fit. Memory is taken only for what the files contain.
    """
    if not _FOLDER.fullmatch(folder.name):
        raise ValueError(f"{folder.name!r} is not the name of its shards")
    wanted: dict[str, Tensor] = {}
    mapped(lambda name, tensor: wanted.update({name: tensor}) if tensor.is_meta else None, state)
    for path in folder.iterdir():
        open_regular(path).close()
    reader = HuggingFaceStorageReader(str(folder))
    _check(wanted, reader.read_metadata())
    tensors = {}
    for name, tensor in wanted.items():
        like = layout.get(name, layout.get(name.rpartition("/")[0]))
        if like is None or like.shape != tensor.shape:
            tensors[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        else:
            tensors[name] = torch.empty_like(like, dtype=tensor.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that nothing is asked of other processes
        try:
            load(tensors, storage_reader=reader, no_dist=True)
        except CheckpointException as error:
            raise ValueError(_reason(error)) from error
    return mapped(lambda name, tensor: tensors[name] if tensor.is_meta else tensor, state)


def _check(wanted: Mapping[str, Tensor], found: Metadata) -> None:
    """Raises ValueError unless the files have every tensor, whole."""
    for name, tensor in wanted.items():
        stored = found.state_dict_metadata.get(name)
        if not isinstance(stored, TensorStorageMetadata):
            raise ValueError(f"{name} is missing")
        parts = sum(prod(chunk.sizes) for chunk in stored.chunks)
        if stored.size != tensor.shape or stored.properties.dtype != tensor.dtype or parts != tensor.numel():
            raise ValueError(f"a part of {name} is missing")
