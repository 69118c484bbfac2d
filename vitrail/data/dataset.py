"""What a data set is, whatever it came from: splits of images with their targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from vitrail.config import Task as Task
from vitrail.data.images import Pixels, read_image

Numbers = npt.NDArray[np.int64]
Array = npt.NDArray[Any]
Targets = npt.NDArray[Any]  # (N,) class numbers; (N, K) of 0 and 1, or of numbers: see `Split.targets`


class Split(Protocol):
    """One split of a data set: images with their targets, by number."""

    @property
    def targets(self) -> Targets:
        """What every image is to be taken for, by the task of the data.

        Class numbers, (N,) int64; for multi-label 0 or 1 for each of the K labels, for regression K numbers, both
        (N, K) float32.
        """

    def __len__(self) -> int: ...

    def image(self, i: int) -> Pixels:
        """Image `i` as stored, (H, W, C) uint8."""

    def name(self, i: int) -> str:
        """What image `i` is called: its path, or "digits/train/17"."""


@dataclass(frozen=True, eq=False)
class FileSplit:
    """Images in files, read when asked for."""

    paths: Sequence[Path]
    targets: Targets
    channels: int
    least: int | None = None  # as in `read_image`

    def __len__(self) -> int:
        return len(self.paths)

    def image(self, i: int) -> Pixels:
        return read_image(self.paths[i], self.channels, self.least)

    def name(self, i: int) -> str:
        return str(self.paths[i])


@dataclass(frozen=True, eq=False)
class ArraySplit:
    """Images of one size in memory: (N, H, W, C) uint8."""

    pixels: Pixels
    targets: Targets
    title: str

    def __len__(self) -> int:
        return len(self.pixels)

    def image(self, i: int) -> Pixels:
        image: Pixels = self.pixels[i]
        return image

    def name(self, i: int) -> str:
        return f"{self.title}/{i}"


@dataclass(frozen=True)
class Data:
    """A data set, opened and checked."""

    name: str  # short, for run folders
    classes: tuple[str, ...]  # of a regression, the names of the numbers
    splits: Mapping[str, Split]  # "train", "val", and "test" where there is one
    size: tuple[int, int]  # typical height and width: the array's own, or the medians over the files
    channels: int  # 1 if every image is grey, else 3
    unreadable: tuple[tuple[str, str], ...]  # file, reason: left out
    task: Task = "multiclass"


@dataclass(frozen=True)
class Found:
    """What a source holds, before a validation split is held out."""

    name: str
    classes: tuple[str, ...]
    parts: dict[str, tuple[Array, Targets]]  # split: paths or pixels, targets
    make: Callable[[str, Array, Targets], Split]
    size: tuple[int, int]
    channels: int
    unreadable: tuple[tuple[str, str], ...] = ()
    task: Task = "multiclass"
