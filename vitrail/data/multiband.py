"""Image files beyond Pillow: NumPy arrays, multi-band TIFF and 16-bit colour."""

from __future__ import annotations

import logging
import math
import re
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError
from PIL.TiffImagePlugin import TiffImageFile

from vitrail.data.npy import declared, read_array
from vitrail.data.pixels import TIFF, Pixels, UnreadableImage, to_float32

_NPY = b"\x93NUMPY"
_DEEP_PNG = re.compile(rb"\x89PNG\r\n\x1a\n....IHDR.{8}\x10\x02", re.DOTALL)  # 16-bit RGB
# TIFF tags: bits per sample, samples per pixel, extra samples, image description.
_BITS, _SAMPLES, _EXTRA, _DESCRIPTION = 258, 277, 338, 270
_STACKED = ('{"shape"', "ImageJ=", "<?xml", "<OME")  # descriptions of files whose pages may be bands of one image

_MAX_VALUES = 2**30  # per image


@dataclass(frozen=True, eq=False)
class Bands:
    """The format and the pixels of such a file."""

    format: str
    pixels: Pixels


def read_bands(file: BinaryIO) -> Bands | None:
    """The bands of an open file; None if Pillow can read it, or if it is not an image."""
    file.seek(0)
    first = file.read(26)
    file.seek(0)
    if first.startswith(_NPY):
        return Bands("NPY", _read_npy(file))
    if _DEEP_PNG.match(first):
        _check_pixels(int.from_bytes(first[16:20], "big") * int.from_bytes(first[20:24], "big"))
        return Bands("PNG", _read_png(file))
    if first[:4] in TIFF and _beyond_pillow(file):
        file.seek(0)
        return Bands("TIFF", _read_tiff(file))
    return None


def read_band_header(file: BinaryIO) -> tuple[str, int, int] | None:
    """The format, height and width of such a file, by its header; None if Pillow can read it, or it is not an image."""
    first = file.read(6)
    file.seek(0)
    if first.startswith(_NPY):
        return "NPY", *_npy_size(file)
    if first[:4] in TIFF and _beyond_pillow(file):
        return "TIFF", *_tiff_size(file)
    file.seek(0)
    return None


def _npy_size(file: BinaryIO) -> tuple[int, int]:
    """Height and width of an array that is stored as a file claims; raises UnreadableImage if it is not."""
    try:
        shape, dtype = declared(file)
    except Exception as error:  # numpy raises many types on damaged files
        raise UnreadableImage("damaged") from error
    start, end = file.tell(), file.seek(0, 2)
    if len(shape) not in (2, 3) or math.prod(shape) * dtype.itemsize != end - start:
        raise UnreadableImage(f"an array of shape {shape} that does not match the file's size")
    # The two largest sides: bands may come first or last.
    h, w = sorted(shape)[-2:]
    return h, w


def _tiff_size(file: BinaryIO) -> tuple[int, int]:
    """Height and width of a TIFF file that Pillow cannot open; raises UnreadableImage."""
    try:
        import tifffile  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as error:
        raise UnreadableImage("this TIFF file needs tifffile: pip install 'vitrail[data]'") from error
    logging.getLogger("tifffile").setLevel(logging.CRITICAL)  # we report damaged files ourselves
    try:
        file.seek(0)
        with tifffile.TiffFile(file) as tiff:
            page = tiff.pages.first
            return int(page.imagelength), int(page.imagewidth)
    except Exception as error:  # tifffile raises many types on damaged files
        raise UnreadableImage("damaged") from error


def _check_pixels(count: int) -> None:
    """Raises DecompressionBombError beyond the limit of Pillow, which does not open these files."""
    if Image.MAX_IMAGE_PIXELS is not None and count > 2 * Image.MAX_IMAGE_PIXELS:
        raise Image.DecompressionBombError(f"{count} pixels")


def _read_npy(file: BinaryIO) -> Pixels:
    try:
        values = read_array(file)
    except ValueError as error:
        if "allow_pickle" in str(error):
            raise UnreadableImage("an array of Python objects, which could run code") from error
        raise
    return array_pixels(channels_last(values))


def channels_last(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """An array as (H, W, C); it is taken to be (C, H, W) if its first dimension is the smallest."""
    channels_first = values.ndim == 3 and values.shape[0] < min(values.shape[1:])
    return values.transpose(1, 2, 0) if channels_first else values


def _beyond_pillow(file: BinaryIO) -> bool:
    """Whether a TIFF file has bands that Pillow cannot read, drops or reduces to 8 bits."""
    try:
        image = Image.open(file, formats=("TIFF",))
    except UnidentifiedImageError:
        return True
    assert isinstance(image, TiffImageFile)
    tags = image.tag_v2
    if str(tags.get(_DESCRIPTION, "")).startswith(_STACKED) and image.n_frames > 1:
        return True
    unnamed = 0 in tags.get(_EXTRA, ())  # neither colour nor transparency
    return tags.get(_SAMPLES, 1) > 1 and (unnamed or max(tags.get(_BITS, (1,))) > 8)


def _read_png(file: BinaryIO) -> Pixels:
    try:
        import imagecodecs  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as error:
        raise UnreadableImage("16-bit colour needs imagecodecs: pip install 'vitrail[data]'") from error
    return array_pixels(imagecodecs.png_decode(file.read()))


def _read_tiff(file: BinaryIO) -> Pixels:
    """The bands of the first page, or of all pages if the metadata says that they form one image."""
    try:
        import tifffile  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as error:
        raise UnreadableImage("this TIFF file needs tifffile: pip install 'vitrail[data]'") from error
    logging.getLogger("tifffile").setLevel(logging.CRITICAL)  # we report damaged files ourselves
    with tifffile.TiffFile(file) as tiff:
        source = tiff.series[0] if tiff.is_shaped or tiff.is_imagej or tiff.is_ome else tiff.pages.first
        _check_pixels(source.size // max(min(source.shape, default=1), 1) if len(source.shape) > 2 else source.size)
        if source.size > _MAX_VALUES:
            raise UnreadableImage(f"{source.size:,} values, above the limit of {_MAX_VALUES:,}")
        values = source.asarray(maxworkers=1)
        if source.axes in ("SYX", "CYX"):
            values = values.transpose(1, 2, 0)
        elif source.axes != "YXS":  # bands as pages, as tifffile writes arrays that do not look like RGB
            values = channels_last(values)
        return array_pixels(values)


def array_pixels(values: npt.NDArray[Any]) -> Pixels:
    """Values of any numeric type, (H, W) or (H, W, C), as pixels; raises UnreadableImage."""
    if values.ndim not in (2, 3) or 0 in values.shape:
        raise UnreadableImage(f"an array of shape {values.shape}, not (height, width, channels)")
    if values.dtype.kind not in "buif":
        raise UnreadableImage(f"values of type {values.dtype}, not numbers")
    values = np.ascontiguousarray(values if values.ndim == 3 else values[:, :, None])
    if values.dtype == bool:
        return values.astype(np.uint8) * np.uint8(255)
    if values.dtype.kind == "u" and values.dtype.itemsize <= 2:
        return values.astype(values.dtype.newbyteorder("="), copy=False)
    return to_float32(values)
