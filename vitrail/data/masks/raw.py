"""Masks as they are stored: picture files of values or colours, arrays, and polygons to draw."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from vitrail.data.dataset import Store
from vitrail.data.images import FORMATS, ImageFacts, failures
from vitrail.data.npy import read_array
from vitrail.data.orientation import UPRIGHT, upright_values
from vitrail.data.pixels import UnreadableImage, check_length
from vitrail.errors import shown
from vitrail.files import open_regular

Values = NDArray[np.integer[Any]]

_LONGEST_RUN = 60  # bits
_FINE = 4  # how much polygons are enlarged to draw them
COLOUR = 1 << 24  # added to 0xRRGGBB, so that colours differ from other values


class RawMask(Protocol):
    """A mask with the values of its file."""

    @property
    def name(self) -> str: ...

    def values(self) -> Values:
        """The value of every pixel, (H, W), or its colour as `COLOUR` + 0xRRGGBB; raises UnreadableImage."""


@dataclass(frozen=True)
class MaskFile:
    """A picture or `.npy` file. Values of a palette are its indices, unless its `colours` are meant."""

    path: Path
    colours: bool = False
    turn: int = UPRIGHT  # EXIF orientation of the image, if the mask lies on its stored pixels

    @property
    def name(self) -> str:
        return str(self.path)

    def values(self) -> Values:
        if self.path.suffix.lower() != ".npy":
            return upright_values(read_values(self.path, self.colours), self.turn)
        with failures(), open_regular(self.path) as file:
            return upright_values(_plane(read_array(file)), self.turn)

    def __repr__(self) -> str:
        return f"{self.path.parent.name}/{self.path.name} {self.path.stat().st_size} {self.turn}"


@dataclass(frozen=True, eq=False)
class MaskCell:
    """A picture in a row of a `Store`, the mask of an image with these facts."""

    store: Store
    row: int
    image: ImageFacts | str  # or why it cannot be read
    turn: int = UPRIGHT  # as of a MaskFile

    @property
    def name(self) -> str:
        return self.store.name(self.row)

    def values(self) -> Values:
        return upright_values(read_values(io.BytesIO(self.store.read(self.row))), self.turn)

    def __repr__(self) -> str:
        return f"{self.name} {self.store.version()} {self.turn}"


def read_values(source: Path | io.BytesIO, colours: bool = False) -> Values:
    """The values of a picture; raises UnreadableImage."""
    with (
        failures(),
        open_regular(source) if isinstance(source, Path) else source as stream,
        _opened(stream) as file,
    ):
        picture: Image.Image = file
        if file.format == "JPEG":
            raise UnreadableImage("a JPEG file, whose compression changes values: masks must be PNG files")
        if colours and picture.mode in ("P", "PA"):
            picture = picture.convert("RGB")
        return _plane(np.asarray(picture))


def _opened(stream: BinaryIO) -> Image.Image:
    check_length(stream)
    return Image.open(stream, formats=FORMATS)


def _plane(values: NDArray[Any]) -> Values:
    """One integer per pixel: (H, W), or colours of three channels that differ."""
    if values.ndim == 3 and values.shape[2] in (2, 4):
        values = values[..., :-1]  # without transparency
    if values.ndim == 3 and values.shape[2] in (1, 3):
        same = (values == values[..., :1]).all()
        if same:
            values = values[..., 0]
        else:
            parts = values.astype(np.int32)
            return COLOUR + (parts[..., 0] << 16) + (parts[..., 1] << 8) + parts[..., 2]
    if values.ndim != 2:
        raise UnreadableImage(f"an array of shape {values.shape}, not (height, width)")
    if values.dtype == bool:
        return values.astype(np.uint8)
    if values.dtype.kind == "f" and (values == np.rint(values)).all():
        values = values.astype(np.int32)
    if values.dtype.kind not in "iu" or (values.size and values.min() < 0):
        raise UnreadableImage("values that are not whole numbers from 0")
    return values


Ring = tuple[float, ...]  # x, y, x, y, … in pixels


@dataclass(frozen=True)
class Shape:
    """A region with a value: polygons, filled together, or run lengths."""

    value: int
    rings: tuple[Ring, ...] = ()
    runs: tuple[int, ...] | bytes = ()  # COCO's RLE, uncompressed or compressed


@dataclass(frozen=True)
class DrawnMask:
    """Shapes on a ground of value 0, later ones on top."""

    name: str
    size: tuple[int, int]
    shapes: tuple[Shape, ...]
    turn: int = UPRIGHT  # as of a MaskFile

    def values(self) -> Values:
        with failures():
            mask = np.zeros(self.size, np.int32)
            for shape in self.shapes:
                if shape.runs:
                    mask[decode_runs(shape.runs, self.size)] = shape.value
                if shape.rings:
                    mask[drawn(shape.rings, self.size)] = shape.value
            return upright_values(mask, self.turn)

    def __repr__(self) -> str:
        return f"{Path(self.name).name} {self.size} {self.shapes} {self.turn}"


def drawn(rings: Sequence[Ring], size: tuple[int, int]) -> NDArray[np.bool_]:
    """The pixels whose centres are inside of polygons.

    Pillow fills the outline too, so a polygon is drawn enlarged and every fourth pixel is read.
    """
    found = np.zeros(size, bool)
    for ring in rings:
        xs, ys = ring[::2], ring[1::2]
        left, top = max(math.floor(min(xs)), 0), max(math.floor(min(ys)), 0)
        right, bottom = min(math.ceil(max(xs)), size[1]), min(math.ceil(max(ys)), size[0])
        if right <= left or bottom <= top:
            continue
        picture = Image.new("1", (_FINE * (right - left), _FINE * (bottom - top)))
        corners = [(_FINE * (x - left), _FINE * (y - top)) for x, y in zip(xs, ys, strict=True)]
        ImageDraw.Draw(picture).polygon(corners, fill=1)
        found[top:bottom, left:right] |= np.asarray(picture)[_FINE // 2 :: _FINE, _FINE // 2 :: _FINE]
    return found


def decode_runs(runs: Sequence[int] | bytes, size: tuple[int, int]) -> NDArray[np.bool_]:
    """COCO's run-length encoding: lengths of 0 and 1 in turn, down the columns; as bytes, compressed."""
    counts = list(_uncompressed(runs)) if isinstance(runs, bytes) else list(runs)
    if min(counts, default=0) < 0 or sum(counts) != size[0] * size[1]:
        raise UnreadableImage(f"run lengths of {shown(sum(counts))} pixels, but the image has {size[0] * size[1]}")
    flat = np.repeat(np.arange(len(counts)) % 2 == 1, counts)
    return np.ascontiguousarray(flat.reshape(size[::-1]).T)


def _uncompressed(text: bytes) -> list[int]:
    """The numbers of a compressed RLE: 5 bits a character, each number after the second as a difference."""
    counts: list[int] = []
    at = 0
    while at < len(text):
        number = shift = 0
        more = True
        while more:
            if at >= len(text) or shift > _LONGEST_RUN:
                raise UnreadableImage("damaged run lengths")
            bits = text[at] - 48
            number |= (bits & 0x1F) << shift
            more, shift, at = bool(bits & 0x20), shift + 5, at + 1
            if not more and bits & 0x10:
                number |= -1 << shift
        counts.append(number + counts[-2] if len(counts) > 2 else number)
    return counts
