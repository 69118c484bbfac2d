"""Files that hold more than a picture: NumPy arrays, and TIFF files with many bands or 16-bit colour."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError
from PIL.TiffImagePlugin import TiffImageFile

from vitrail.data.pixels import Pixels, UnreadableImage, floats

_NPY = b"\x93NUMPY"
_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")  # small and large files, in both orders of bytes
_BITS, _SAMPLES, _EXTRA = 258, 277, 338  # tags of TIFF: bits per sample, samples per pixel, what further samples are


@dataclass(frozen=True, eq=False)
class Bands:
    """The content of such a file."""

    format: str
    pixels: Pixels


def read_bands(file: BinaryIO) -> Bands | None:
    """The bands of an open file; None if it is a picture that Pillow reads as well, or no image."""
    file.seek(0)
    first = file.read(len(_NPY))
    file.seek(0)
    if first == _NPY:
        return Bands("NPY", _read_npy(file))
    if first[:4] in _TIFF and _beyond_pillow(file):
        file.seek(0)
        return Bands("TIFF", _read_tiff(file))
    return None


def _read_npy(file: BinaryIO) -> Pixels:
    values = np.load(file, allow_pickle=False)
    if values.ndim == 3 and values.shape[0] < min(values.shape[1:]):
        values = values.transpose(1, 2, 0)  # torch's order: channels first
    return _pixels(values)


def _beyond_pillow(file: BinaryIO) -> bool:
    """Whether a TIFF file has samples that Pillow does not know, drops or cuts to 8 bits."""
    try:
        image = Image.open(file, formats=("TIFF",))
    except UnidentifiedImageError:
        return True
    assert isinstance(image, TiffImageFile)
    unnamed = 0 in image.tag_v2.get(_EXTRA, ())  # neither colour nor transparency
    return image.tag_v2.get(_SAMPLES, 1) > 1 and (unnamed or max(image.tag_v2.get(_BITS, (1,))) > 8)


def _read_tiff(file: BinaryIO) -> Pixels:
    """All bands of the first page."""
    try:
        import tifffile  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as error:
        raise UnreadableImage("a TIFF file that needs tifffile: pip install 'vitrail[data]'") from error
    logging.getLogger("tifffile").setLevel(logging.CRITICAL)  # what is wrong with a file is ours to say
    with tifffile.TiffFile(file) as tiff:
        page = tiff.pages.first
        if page.imagelength * page.imagewidth > 2 * (Image.MAX_IMAGE_PIXELS or 2**62):
            raise Image.DecompressionBombError
        values = page.asarray(maxworkers=1)
        return _pixels(values.transpose(1, 2, 0) if page.axes == "SYX" else values)


def _pixels(values: npt.NDArray[Any]) -> Pixels:
    """Numbers of any type, (H, W) or (H, W, C), as those of an image."""
    if values.ndim not in (2, 3) or 0 in values.shape:
        raise UnreadableImage(f"an array of shape {values.shape}, not (height, width, channels)")
    if values.dtype.kind not in "buif":
        raise UnreadableImage(f"values of type {values.dtype}, not numbers")
    values = np.ascontiguousarray(values if values.ndim == 3 else values[:, :, None])
    if values.dtype == bool:
        return values.astype(np.uint8) * np.uint8(255)
    if values.dtype.kind == "u" and values.dtype.itemsize <= 2:
        return values.astype(values.dtype.newbyteorder("="), copy=False)
    return floats(values)
