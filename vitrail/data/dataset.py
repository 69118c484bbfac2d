"""What a data set is, whatever it came from: splits of images with their targets."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from vitrail.data.images import Pixels, read_image
from vitrail.data.pixels import NAMES
from vitrail.errors import UserError
from vitrail.tasks import Task

Numbers = npt.NDArray[np.int64]
Array = npt.NDArray[Any]
Targets = npt.NDArray[Any]  # (N,) class numbers; (N, K) of 0 and 1, or of numbers: see `Split.targets`
T = TypeVar("T")


class Split(Protocol):
    """One split of a data set: images with their targets, by number."""

    @property
    def targets(self) -> Targets:
        """What is true of every image, in the form of the data's task.

        Class numbers, (N,) int64; for multi-label 0 or 1 for each of the K labels, for regression K values, both
        (N, K) float32.
        """

    def __len__(self) -> int: ...

    def image(self, i: int) -> Pixels:
        """Image `i` as stored, (H, W, C): uint8, uint16 or float32."""

    def name(self, i: int) -> str:
        """What image `i` is called: its path, or "digits/train/17"."""


@dataclass(frozen=True, eq=False)
class FileSplit:
    """Images in files, read when asked for."""

    paths: Sequence[Path]
    targets: Targets
    channels: int
    bits: int = 8
    least: int | None = None  # as in `read_image`

    def __len__(self) -> int:
        return len(self.paths)

    def image(self, i: int) -> Pixels:
        return read_image(self.paths[i], self.channels, self.bits, self.least)

    def name(self, i: int) -> str:
        return str(self.paths[i])

    def version(self) -> str:
        """Changes when any of the files does."""
        return files_version(self.paths)


class Store(Protocol):
    """The images of one split as their files would hold them."""

    def read(self, row: int) -> bytes:
        """The content of an image's file; an UnreadableImage if it cannot be had."""

    def name(self, row: int) -> str: ...

    def version(self) -> str | None:
        """Changes when any of the images does; None if that cannot be told."""


@dataclass(frozen=True, eq=False)
class PackedSplit:
    """Rows of a store, read when asked for."""

    store: Store
    rows: Numbers
    targets: Targets
    channels: int
    bits: int = 8
    least: int | None = None  # as in `read_image`

    def __len__(self) -> int:
        return len(self.rows)

    def image(self, i: int) -> Pixels:
        return read_image(self.content(i), self.channels, self.bits, self.least)

    def content(self, i: int) -> bytes:
        """What the file of image `i` would hold."""
        return self.store.read(int(self.rows[i]))

    def name(self, i: int) -> str:
        return self.store.name(int(self.rows[i]))

    def version(self) -> str | None:
        """Changes when any of the images does; None if that cannot be told."""
        version = self.store.version()
        return None if version is None else version + hashlib.blake2b(self.rows.tobytes(), digest_size=16).hexdigest()


def files_version(paths: Iterable[Path]) -> str:
    """Changes when the path, the size or the time of any of the files does."""
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        facts = path.stat()
        digest.update(f"{path.absolute()}\0{facts.st_size}\0{facts.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class ArraySplit:
    """Images of one size in memory: (N, H, W, C) uint8, uint16 or float32."""

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
    """Images of one size in a file that is mapped into memory: rows of (N, H, W, C) uint8, read when asked for."""

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
    """A data set, opened and checked."""

    name: str  # short, for run folders
    task: Task
    splits: Mapping[str, Split]  # "train", "val", and "test" where there is one
    size: tuple[int, int]  # typical height and width: the array's own, or the medians over the files
    channels: int  # 1 if every image is grey, 3 if some have colour, else the number of bands
    unreadable: tuple[tuple[str, str], ...]  # file, reason: left out
    bits: int = 8  # of a value: 8, 16, or 32 for floats

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
        """The same images, read with the channels and bits that a model wants; a UserError if they cannot be."""
        possible = (1, 3, 4) if self.channels in (1, 3) else (self.channels,)
        if channels not in possible:
            raise UserError(
                f"The images of {self.name} have {self.channels} channels, of which {channels} cannot be made: "
                f"'channels' must be {' or '.join(map(str, possible))}."
            )
        if (bits == 32) != (self.bits == 32):
            raise UserError(
                f"The images of {self.name} have {NAMES[self.bits]} values, of which {NAMES[bits]} ones cannot be "
                f"made: 'bits' must be {'32' if self.bits == 32 else '8 or 16'}."
            )
        splits = {
            name: replace(split, channels=channels, bits=bits) if isinstance(split, FileSplit | PackedSplit) else split
            for name, split in self.splits.items()
        }
        return replace(self, splits=splits)


class Parts(Generic[T]):
    """Numbers the rows of all parts of a source through, so that rows tell their part whatever split they come into."""

    def __init__(self, parts: Sequence[tuple[T, int]]):
        self._parts = [part for part, _ in parts]
        self._starts = np.cumsum([0, *(length for _, length in parts)])

    def rows(self) -> list[Numbers]:
        """The numbers of each part's rows."""
        return [np.arange(a, b) for a, b in zip(self._starts, self._starts[1:], strict=False)]

    def find(self, rows: Numbers) -> tuple[T, Numbers]:
        """The part in which all these rows lie, and their numbers in it."""
        first, last = np.searchsorted(self._starts, [rows.min(), rows.max()], side="right") - 1
        if first != last:
            raise UserError("Folds are cut from one split, but this data comes in several files. Leave out --folds.")
        part = int(first)
        return self._parts[part], rows - self._starts[part]


@dataclass(frozen=True)
class Found:
    """What a source holds, before a validation split is held out."""

    name: str
    task: Task
    parts: dict[str, tuple[Array, Targets]]  # split: paths or pixels, targets
    make: Callable[[str, Array, Targets], Split]
    size: tuple[int, int]
    channels: int
    unreadable: tuple[tuple[str, str], ...] = ()
    bits: int = 8

    @property
    def classes(self) -> tuple[str, ...]:
        return self.task.classes
