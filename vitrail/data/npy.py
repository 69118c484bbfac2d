"""Headers of `.npy` files and `.npz` archives: what they claim to contain, before memory is taken for it."""

from __future__ import annotations

import math
import mmap
import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from vitrail.errors import UserError

Declared = tuple[tuple[int, ...], np.dtype[Any]]


def declared(stream: IO[bytes]) -> Declared:
    """The shape and type that the header of a `.npy` file states; the stream is then at the first value."""
    known: Any = np.lib.format  # partly untyped
    first = known.read_magic(stream) == (1, 0)
    shape, _, dtype = (known.read_array_header_1_0 if first else known.read_array_header_2_0)(stream)
    if any(side < 0 for side in shape):
        raise ValueError(f"its shape is {shape}")
    return shape, dtype


def check_stored(what: str, content: Declared, available: int) -> None:
    """Raises ValueError if an array claims more values than the `available` bytes can hold."""
    shape, dtype = content
    if not dtype.hasobject and math.prod(shape) * dtype.itemsize > available:
        raise ValueError(f"{what} claims {math.prod(shape):,} values, more than it stores")


def check_zip(path: Path, ratio: int, always: int, what: str) -> None:
    """Rejects a zip bomb, which expands by more than `ratio` and beyond `always` bytes, before it is decompressed."""
    with zipfile.ZipFile(path) as file:
        unpacked = sum(member.file_size for member in file.infolist())
    size = path.stat().st_size
    if unpacked > max(ratio * size, always):
        raise UserError(f"{path} has {size:,} bytes but would expand to {unpacked:,}, which no {what} do. Not opened.")


def read_member(file: np.lib.npyio.NpzFile, name: str) -> NDArray[Any]:
    """An array of an archive, once its header has shown that the archive holds what it claims."""
    archive: zipfile.ZipFile = file.zip
    stored = f"{name}.npy" if f"{name}.npy" in archive.namelist() else name
    with archive.open(stored) as stream:
        check_stored(stored, declared(stream), archive.getinfo(stored).file_size)
    return np.asarray(file[name])


def check_mapped(array: NDArray[Any], way_out: str = "Restore it.") -> NDArray[Any]:
    """The array; raises UserError if its file has become shorter, because the system kills who reads beyond the end.

    The size is that of the open file, which may have been deleted, and the array may be a part of what is mapped.
    """
    mapped: mmap.mmap | None = getattr(array, "_mmap", None)
    if isinstance(array, np.memmap) and mapped is not None:
        start = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
        if mapped.size() < start + len(mapped):
            raise UserError(f"{array.filename} has become shorter while it was in use. {way_out}")
    return array
