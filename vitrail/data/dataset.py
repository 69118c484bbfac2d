"""What a data set is, whatever it came from: splits of images with their targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from vitrail.data.images import Pixels, read_image

Numbers = npt.NDArray[np.int64]
Array = npt.NDArray[Any]
T = TypeVar("T")


class Split(Protocol):
    """One split of a data set: images with their targets, by number."""

    @property
    def targets(self) -> Numbers:
        """The class number of every image, (N,) int64."""

    def __len__(self) -> int: ...

    def image(self, i: int) -> Pixels:
        """Image `i` as stored, (H, W, C) uint8."""

    def name(self, i: int) -> str:
        """What image `i` is called: its path, or "digits/train/17"."""


@dataclass(frozen=True, eq=False)
class FileSplit:
    """Images in files, read when asked for."""

    paths: Sequence[Path]
    targets: Numbers
    channels: int

    def __len__(self) -> int:
        return len(self.paths)

    def image(self, i: int) -> Pixels:
        return read_image(self.paths[i], self.channels)

    def name(self, i: int) -> str:
        return str(self.paths[i])


@dataclass(frozen=True, eq=False)
class ArraySplit:
    """Images of one size in memory: (N, H, W, C) uint8."""

    pixels: Pixels
    targets: Numbers
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
    targets: Numbers
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
    classes: tuple[str, ...]
    splits: Mapping[str, Split]  # "train", "val", and "test" where there is one
    size: tuple[int, int]  # typical height and width: the array's own, or the medians over the files
    channels: int  # 1 if every image is grey, else 3
    unreadable: tuple[tuple[str, str], ...]  # file, reason: left out


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
        part = int(np.searchsorted(self._starts, rows[0], side="right")) - 1
        return self._parts[part], rows - self._starts[part]


@dataclass(frozen=True)
class Found:
    """What a source holds, before a validation split is held out."""

    name: str
    classes: tuple[str, ...]
    parts: dict[str, tuple[Array, Numbers]]  # split: paths, pixels or numbers of rows; class numbers
    make: Callable[[str, Array, Numbers], Split]
    size: tuple[int, int]
    channels: int
    unreadable: tuple[tuple[str, str], ...] = ()
