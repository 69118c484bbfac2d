"""`.npy` files and `.npz` archives: their headers are checked before memory is taken for what they claim to contain."""

from __future__ import annotations

import math
import mmap
import threading
import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from vitrail.errors import UserError

Declared = tuple[tuple[int, ...], np.dtype[Any]]

# NumPy parses headers with `ast`, which before Python 3.12.1 fails at random when several threads use it (gh-106905).
_ONE_AT_A_TIME = threading.Lock()
_CHUNK = 2**24  # bytes


def declared(stream: IO[bytes]) -> Declared:
    """The shape and type that the header of a `.npy` file states; the stream is then at the first value."""
    shape, _, dtype = _header(stream)
    return shape, dtype


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """The shape, whether columns come first, and the type."""
    known: Any = np.lib.format  # partly untyped
    with _ONE_AT_A_TIME:
        first = known.read_magic(stream) == (1, 0)
        shape, fortran, dtype = (known.read_array_header_1_0 if first else known.read_array_header_2_0)(stream)
    if any(side < 0 for side in shape):
        raise ValueError(f"its shape is {shape}")
    return shape, fortran, dtype


def read_array(stream: IO[bytes], what: str = "it", size: int | None = None) -> NDArray[Any]:
    """The array of a `.npy` file; many threads may read files at the same time.

    `size` is that of the file in bytes, and need not be given if the stream can seek to its end.
    """
    shape, fortran, dtype = _header(stream)
    if dtype.hasobject:
        raise ValueError("an array of Python objects is not loaded, as with numpy.load(…, allow_pickle=False)")
    start = stream.tell()
    if size is None:
        size = stream.seek(0, 2)
        stream.seek(start)
    check_stored(what, (shape, dtype), size - start)
    content = memoryview(bytearray(math.prod(shape) * dtype.itemsize))
    for first in range(0, len(content), _CHUNK):
        part = content[first : first + _CHUNK]
        part[:] = stream.read(len(part))  # raises ValueError if the file ends before
    return np.ndarray(shape, dtype, buffer=content, order="F" if fortran else "C")


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
        return read_array(stream, stored, archive.getinfo(stored).file_size)


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
