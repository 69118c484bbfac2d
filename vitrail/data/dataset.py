"""What a data set is, whatever it came from: splits of images with their targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from vitrail.data.images import Pixels, read_image
from vitrail.data.pixels import NAMES
from vitrail.errors import UserError

Numbers = npt.NDArray[np.int64]
Array = npt.NDArray[Any]


class Split(Protocol):
    """One split of a data set: images with their targets, by number."""

    @property
    def targets(self) -> Numbers:
        """The class number of every image, (N,) int64."""

    def __len__(self) -> int: ...

    def image(self, i: int) -> Pixels:
        """Image `i` as stored, (H, W, C): uint8, uint16 or float32."""

    def name(self, i: int) -> str:
        """What image `i` is called: its path, or "digits/train/17"."""


@dataclass(frozen=True, eq=False)
class FileSplit:
    """Images in files, read when asked for."""

    paths: Sequence[Path]
    targets: Numbers
    channels: int
    bits: int = 8

    def __len__(self) -> int:
        return len(self.paths)

    def image(self, i: int) -> Pixels:
        return read_image(self.paths[i], self.channels, self.bits)

    def name(self, i: int) -> str:
        return str(self.paths[i])


@dataclass(frozen=True, eq=False)
class ArraySplit:
    """Images of one size in memory: (N, H, W, C) uint8, uint16 or float32."""

    pixels: Pixels
    targets: Numbers
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
    classes: tuple[str, ...]
    splits: Mapping[str, Split]  # "train", "val", and "test" where there is one
    size: tuple[int, int]  # typical height and width: the array's own, or the medians over the files
    channels: int  # 1 if every image is grey, 3 if some have colour, else the number of bands
    unreadable: tuple[tuple[str, str], ...]  # file, reason: left out
    bits: int = 8  # of a value: 8, 16, or 32 for floats

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
            name: replace(split, channels=channels, bits=bits) if isinstance(split, FileSplit) else split
            for name, split in self.splits.items()
        }
        return replace(self, splits=splits)


@dataclass(frozen=True)
class Found:
    """What a source holds, before a validation split is held out."""

    name: str
    classes: tuple[str, ...]
    parts: dict[str, tuple[Array, Numbers]]  # split: paths or pixels, class numbers
    make: Callable[[str, Array, Numbers], Split]
    size: tuple[int, int]
    channels: int
    unreadable: tuple[tuple[str, str], ...] = ()
    bits: int = 8
