"""`Data` and its splits, whatever source they come from."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from vitrail.data.images import Pixels, read_image
from vitrail.data.pixels import BIT_DEPTHS
from vitrail.errors import UserError
from vitrail.tasks import Task

Numbers = npt.NDArray[np.int64]
Array = npt.NDArray[Any]
Targets = npt.NDArray[Any]  # see `Split.targets`
T = TypeVar("T")


class Split(Protocol):
    """One split of a data set: images and their targets, indexed by number."""

    @property
    def targets(self) -> Targets:
        """The targets of all images, in the form of the data's task.

        Multi-class: class indices, (N,) int64. Multi-label: 0 or 1 per label, (N, K) float32. Regression: values,
        (N, K) float32.
        """

    def __len__(self) -> int: ...

    def image(self, i: int) -> Pixels:
        """Image `i` as stored, (H, W, C): uint8, uint16 or float32."""

    def name(self, i: int) -> str:
        """The name of image `i`: its path, or e.g. "digits/train/17"."""


@dataclass(frozen=True, eq=False)
class FileSplit:
    """Image files, read on access."""

    paths: Sequence[Path]
    targets: Targets
    channels: int
    bits: int = 8
    min_side: int | None = None  # as in `read_image`

    def __len__(self) -> int:
        return len(self.paths)

    def image(self, i: int) -> Pixels:
        return read_image(self.paths[i], self.channels, self.bits, self.min_side)

    def name(self, i: int) -> str:
        return str(self.paths[i])

    def version(self) -> str:
        """A hash that changes whenever one of the files does."""
        return files_version(self.paths)


class Store(Protocol):
    """Random access to the encoded images of one split."""

    def read(self, row: int) -> bytes:
        """The encoded image, as in a file; raises UnreadableImage."""

    def name(self, row: int) -> str: ...

    def version(self) -> str | None:
        """A hash that changes whenever one of the images does; None if changes cannot be detected."""


@dataclass(frozen=True, eq=False)
class PackedSplit:
    """Rows of a `Store`, read on access."""

    store: Store
    rows: Numbers
    targets: Targets
    channels: int
    bits: int = 8
    min_side: int | None = None  # as in `read_image`

    def __len__(self) -> int:
        return len(self.rows)

    def image(self, i: int) -> Pixels:
        return read_image(self.content(i), self.channels, self.bits, self.min_side)

    def content(self, i: int) -> bytes:
        """The encoded image `i`."""
        return self.store.read(int(self.rows[i]))

    def name(self, i: int) -> str:
        return self.store.name(int(self.rows[i]))

    def version(self) -> str | None:
        """A hash that changes whenever one of the images does; None if changes cannot be detected."""
        version = self.store.version()
        return None if version is None else version + hashlib.blake2b(self.rows.tobytes(), digest_size=16).hexdigest()


def files_version(paths: Iterable[Path]) -> str:
    """A hash of the files' paths, sizes and modification times."""
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        stat = path.stat()
        digest.update(f"{path.absolute()}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class ArraySplit:
    """Images of equal size in memory: (N, H, W, C) uint8, uint16 or float32."""

    pixels: Pixels
    targets: Targets
    title: str

    def __len__(self) -> int:
        return len(self.pixels)

    def image(self, i: int) -> Pixels:
        image: Pixels = self.pixels[i]
        return image

    def take(self, numbers: Numbers) -> Pixels:
        """Several images at once, (N, H, W, C)."""
        return self.pixels[numbers]

    def name(self, i: int) -> str:
        return f"{self.title}/{i}"


@dataclass(frozen=True, eq=False)
class MappedSplit:
    """Images of equal size in a memory-mapped file: rows of an (N, H, W, C) array, read on access."""

    pixels: Pixels
    rows: Numbers
    targets: Targets
    title: str

    def __len__(self) -> int:
        return len(self.rows)

    def image(self, i: int) -> Pixels:
        return np.asarray(self.pixels[self.rows[i]])

    def take(self, numbers: Numbers) -> Pixels:
        """Several images at once, (N, H, W, C)."""
        return np.asarray(self.pixels[self.rows[numbers]])

    def name(self, i: int) -> str:
        return f"{self.title}/{self.rows[i]}"


@dataclass(frozen=True)
class Data:
    """A data set, opened, verified and split."""

    name: str  # short, for run folders
    task: Task
    splits: Mapping[str, Split]  # "train", "val", and "test" where there is one
    size: tuple[int, int]  # height and width: of the array, or the medians over all files
    channels: int  # 1 if all images are grayscale, 3 if some are colour, else the number of bands
    unreadable: tuple[tuple[str, str], ...]  # (file, reason) of the images that were skipped
    bits: int = 8  # bit depth: 8, 16, or 32 for floats

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, labels or values."""
        return self.task.classes

    def fingerprint(self) -> str:
        """Changes when the classes, the labels or the number of images change."""
        digest = hashlib.sha256("\n".join(self.classes).encode())
        for name, split in self.splits.items():
            digest.update(name.encode() + split.targets.tobytes())
        return digest.hexdigest()

    def read_as(self, channels: int, bits: int) -> Data:
        """The same images, converted on reading to the channels and bit depth that a model expects."""
        possible = (1, 3, 4) if self.channels in (1, 3) else (self.channels,)
        if channels not in possible:
            raise UserError(
                f"The images of {self.name} have {self.channels} channels and cannot be converted to {channels}: "
                f"'channels' must be {' or '.join(map(str, possible))}."
            )
        if (bits == 32) != (self.bits == 32):
            raise UserError(
                f"The images of {self.name} are {BIT_DEPTHS[self.bits]} and cannot be converted to "
                f"{BIT_DEPTHS[bits]}: 'bits' must be {'32' if self.bits == 32 else '8 or 16'}."
            )
        splits = {
            name: replace(split, channels=channels, bits=bits) if isinstance(split, FileSplit | PackedSplit) else split
            for name, split in self.splits.items()
        }
        return replace(self, splits=splits)


class GlobalRows(Generic[T]):
    """Global row numbers over all parts of a source, so a row finds its part after re-splitting."""

    def __init__(self, parts: Sequence[tuple[T, int]]):
        self._parts = [part for part, _ in parts]
        self._starts = np.cumsum([0, *(length for _, length in parts)])

    def rows(self) -> list[Numbers]:
        """The global row numbers of each part."""
        return [np.arange(a, b) for a, b in zip(self._starts, self._starts[1:], strict=False)]

    def locate(self, rows: Numbers) -> tuple[T, Numbers]:
        """The part that holds all of these global rows, and their row numbers within it."""
        first, last = np.searchsorted(self._starts, [rows.min(), rows.max()], side="right") - 1
        if first != last:
            raise UserError(
                "Cross-validation needs train and val in one file, but this data has a file for each. Drop --folds."
            )
        part = int(first)
        return self._parts[part], rows - self._starts[part]


@dataclass(frozen=True)
class Found:
    """The content of a source, before a validation split is held out."""

    name: str
    task: Task
    parts: dict[str, tuple[Array, Targets]]  # by split: items (paths, pixels or global rows) and targets
    make: Callable[[str, Array, Targets], Split]
    size: tuple[int, int]
    channels: int
    unreadable: tuple[tuple[str, str], ...] = ()
    bits: int = 8

    @property
    def classes(self) -> tuple[str, ...]:
        return self.task.classes
