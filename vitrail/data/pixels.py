"""Pixel arrays (H, W, C): uint8, uint16, or float32 for all other numeric types."""

from __future__ import annotations

import math
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from PIL import Image

Pixels = npt.NDArray[np.uint8 | np.uint16 | np.float32]

WHITE = {8: 255, 16: 65535, 32: 1}  # by bit depth: the value that is scaled to 1; floats are not scaled
BIT_DEPTHS = {8: "8-bit", 16: "16-bit", 32: "floating-point"}


TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")  # TIFF and BigTIFF, in both byte orders
JPEG = b"\xff\xd8"  # start of image
_METADATA = 2**24  # bytes


class UnreadableImage(Exception):
    """An image that cannot be read. The message is the reason, in a few words."""


def check_length(file: BinaryIO) -> None:
    """Raises UnreadableImage for a picture with more bytes than as many pixels as are allowed have, before it is read.

    Four bytes for each pixel, one in a JPEG file, in which Pillow looks for the next marker byte by byte, and 16 MiB of
    metadata. A TIFF file may have any number of pages.
    """
    file.seek(0)
    first, size = file.read(4), file.seek(0, 2)
    file.seek(0)
    each = 1 if first.startswith(JPEG) else 4
    if first not in TIFF and size - _METADATA > 2 * each * (Image.MAX_IMAGE_PIXELS or math.inf):
        raise UnreadableImage(
            f"{size:,} bytes, more than a picture has: allow them by --max-pixels {math.ceil(size / each)}"
        )


def bits_of(image: Pixels) -> int:
    """The bit depth: 8, 16, or 32 for floats."""
    return 8 * image.dtype.itemsize


def fit(image: Pixels, channels: int | None = None, bits: int | None = None) -> Pixels:
    """Converts images (..., H, W, C) to a number of channels and a bit depth; raises UnreadableImage."""
    if bits is not None and bits != bits_of(image):
        image = _to_bits(image, bits)
    if channels is not None and channels != image.shape[-1]:
        image = _to_channels(image, channels)
    return image


def _to_bits(image: Pixels, bits: int) -> Pixels:
    have = bits_of(image)
    if (have, bits) == (8, 16):
        return image.astype(np.uint16) * np.uint16(257)
    if (have, bits) == (16, 8):
        return np.rint(image / np.float32(257)).astype(np.uint8)
    if (have, bits) == (32, 8):
        return _eight_bits(image)
    raise UnreadableImage(f"{BIT_DEPTHS[have]} values, which cannot be converted to {BIT_DEPTHS[bits]}")


def _to_channels(image: Pixels, channels: int) -> Pixels:
    have = image.shape[-1]
    if have not in (1, 3) or channels not in (1, 3, 4):
        raise UnreadableImage(f"{have} channels, which cannot be converted to {channels}")
    if channels == 1:
        return _luminance(image)
    colour = np.repeat(image, 3, axis=-1) if have == 1 else image
    if channels == 3:
        return colour
    return np.concatenate([colour, np.full_like(colour[..., :1], WHITE[bits_of(image)])], axis=-1)


def _luminance(image: Pixels) -> Pixels:
    """A colour image in grayscale, with Pillow's weights and rounding."""
    weights = 19595, 38470, 7471  # of 65536
    if image.dtype == np.float32:
        return image @ (np.array(weights, np.float32)[:, None] / np.float32(65536))
    sums = image.astype(np.uint32) @ np.array(weights, np.uint32)[:, None]
    return ((sums + 32768) >> 16).astype(image.dtype)


def to_float32(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Values as float32; NaN and infinity become 0, as for missing data. Raises UnreadableImage if all are."""
    if values.dtype.kind == "f" and not np.isfinite(values).any():
        raise UnreadableImage("no finite values, only NaN or infinity")
    return np.nan_to_num(values.astype(np.float32), posinf=0.0, neginf=0.0)


def _eight_bits(values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Floats scaled to 0..255 by their maximum, because floats have no defined white point."""
    values = values.astype(np.float64)
    top = values.max()
    if 255 < top <= 65535:
        values /= 257
    elif top > 65535:
        values *= 255 / top
    elif top <= 1:
        values *= 255
    return np.rint(np.clip(values, 0, 255)).astype(np.uint8)


def thumbnail(image: Pixels, side: int = 256) -> Image.Image:
    """`to_pil`, no larger than a square of this side."""
    small = to_pil(image)
    small.thumbnail((side, side), Image.Resampling.LANCZOS)
    return small


def to_pil(image: Pixels, like: Pixels | None = None) -> Image.Image:
    """An image (H, W, C) for display: its first three channels or its first, contrast-stretched unless 8-bit.

    It is stretched as the image `like` would be, if that is given.
    """
    view = image[:, :, : 3 if image.shape[2] >= 3 else 1]
    if view.dtype != np.uint8:
        limits = (image if like is None else like)[:, :, : view.shape[2]]
        low, high = float(limits.min()), float(limits.max())
        scaled = (view.astype(np.float32) - low) * (255 / max(high - low, 1e-12))
        view = np.rint(scaled.clip(0, 255)).astype(np.uint8)
    return Image.fromarray(np.ascontiguousarray(view[:, :, 0] if view.shape[2] == 1 else view))
