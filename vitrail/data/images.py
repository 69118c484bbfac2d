"""Reads image files as a person sees them: upright, on white, in 8 bits, one channel or three."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, UnidentifiedImageError

Pixels = npt.NDArray[np.uint8]

# Named, because Pillow would otherwise try all formats it knows on any file, and start Ghostscript for one.
# `init` registers them here, before threads could do it at the same time.
Image.init()
_FORMATS = tuple(
    kind
    for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "JPEG2000", "AVIF")
    if kind in Image.OPEN
)
EXTENSIONS = frozenset(end.lower() for end, kind in Image.registered_extensions().items() if kind in _FORMATS)

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = {
    Image.Transpose.TRANSPOSE,
    Image.Transpose.ROTATE_270,
    Image.Transpose.TRANSVERSE,
    Image.Transpose.ROTATE_90,
}
_PILLOW_WARNINGS = ("ignore", None, Warning, re.compile(r"PIL\."), 0)


class UnreadableImage(Exception):
    """A file that gives no image. The message is the reason, in a few words."""


@dataclass(frozen=True)
class ImageFacts:
    """The size of an image as a person sees it, and whether it is without colour."""

    h: int
    w: int
    grey: bool


def read_image(path: str | Path, channels: int | None = None) -> Pixels:
    """The pixels of an image file, (H, W, C): C is `channels`, or 1 for a grey image and 3 for others."""
    with _opened(Path(path)) as image:
        grey = _is_grey(image)
        image.load()
        turn = _turn(image)
        image = _plain(image, grey)
        if channels is not None:
            image = image.convert("L" if channels == 1 else "RGB")
        if turn is not None:
            image = image.transpose(turn)
        pixels = np.array(image)
    return pixels if pixels.ndim == 3 else pixels[:, :, None]


def inspect_image(path: str | Path) -> ImageFacts:
    """Proves that the whole image decodes, in small where the format can, and says what it is."""
    with _opened(Path(path)) as image:
        grey = _is_grey(image)
        full = image.size
        drafted = image.draft("L", (1, 1)) is not None
        image.load()
        w, h = full if drafted else image.size  # a TIFF file turns itself as it loads
        if _turn(image) in _SIDEWAYS:
            h, w = w, h
    return ImageFacts(h, w, grey)


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    """An open image; whatever goes wrong with it, then or later, becomes an UnreadableImage."""
    try:
        if path.is_dir():
            raise UnreadableImage("a folder")
        with path.open("rb") as file, _quiet():
            if not file.read(1):
                raise UnreadableImage("empty file")
            file.seek(0)
            with Image.open(file, formats=_FORMATS) as image:
                yield image
    except UnreadableImage:
        raise
    except UnidentifiedImageError as error:
        raise UnreadableImage("not an image") from error
    except Image.DecompressionBombError as error:
        raise UnreadableImage("too many pixels (decompression bomb)") from error
    except MemoryError as error:
        raise UnreadableImage("too large for the memory") from error
    except Exception as error:  # Pillow's decoders answer damaged files with nearly every kind of exception
        if isinstance(error, OSError) and error.strerror:
            raise UnreadableImage(error.strerror[0].lower() + error.strerror[1:]) from error
        reason = "truncated" if "truncated" in str(error).lower() else f"damaged ({error})"
        raise UnreadableImage(reason) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences Pillow's warnings: a file that it warns about is read rightly or reported.

    `warnings.catch_warnings` would not do: it swaps the filters of the whole process, and threads that leave
    it in another order than they entered it restore each other's.
    """
    filters: list[object] = warnings.filters  # type: ignore[assignment]  # typed as a sequence, but it is a list
    filters.insert(0, _PILLOW_WARNINGS)
    try:
        yield
    finally:
        filters.remove(_PILLOW_WARNINGS)


def _is_grey(image: Image.Image) -> bool:
    return image.mode in ("1", "L", "LA", "La", "I", "F") or image.mode.startswith("I;16")


def _turn(image: Image.Image) -> Image.Transpose | None:
    """What makes a loaded image upright, by its EXIF data."""
    try:
        return _TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # broken EXIF data says nothing, and the pixels are good without it
        return None


def _plain(image: Image.Image, grey: bool) -> Image.Image:
    """A loaded image in mode L or RGB."""
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return Image.fromarray(_eight_bits(np.asarray(image), sixteen=image.mode.startswith("I;16")))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        return image.getchannel("R") if grey else image.convert("RGB")
    return image.convert("L" if grey else "RGB")


def _eight_bits(values: npt.NDArray[Any], sixteen: bool) -> Pixels:
    """Deep grey values in 0..255; Pillow would clip them. Where the file does not say how deep, they tell."""
    fractions = values.dtype.kind == "f"
    values = np.nan_to_num(values.astype(np.float64), posinf=0.0, neginf=0.0)
    top = values.max()
    if sixteen or 255 < top <= 65535:
        values /= 257
    elif top > 65535:
        values *= 255 / top
    elif fractions and top <= 1:
        values *= 255
    pixels: Pixels = np.rint(np.clip(values, 0, 255)).astype(np.uint8)
    return pixels
