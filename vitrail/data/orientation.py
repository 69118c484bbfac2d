"""The EXIF orientation of images, 1 to 8: how the stored pixels must be mirrored or rotated to be upright."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image

UPRIGHT = 1
SIDEWAYS = (5, 6, 7, 8)  # height and width are swapped
_TRANSPOSES = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_START, _SCAN = b"\xff\xd8", b"\xda"  # JPEG markers: start of image, start of scan


def orientation(image: Image.Image) -> int:
    """The orientation of an image."""
    try:
        return _known(image.getexif().get(ExifTags.Base.Orientation))
    except Exception:  # ignore broken EXIF data: the pixels are still good
        return UPRIGHT


def jpeg_orientation(content: bytes) -> int | Literal["unknown"]:
    """The orientation of a JPEG file, from its EXIF header; "unknown" if other metadata may define it."""
    at = len(_START)
    while content[at : at + 1] == b"\xff" and content[at + 1 : at + 2] != _SCAN:
        end = at + 2 + int.from_bytes(content[at + 2 : at + 4], "big")
        segment = content[at + 4 : end]
        if segment.startswith(b"Exif\0\0"):
            exif = Image.Exif()
            try:
                exif.load(segment)
                number = exif.get(ExifTags.Base.Orientation)
            except Exception:  # as in `orientation`
                return "unknown"
            if number is not None:
                return _known(number)
        elif b"tiff:Orientation" in segment:  # XMP, which Pillow reads if EXIF has no orientation
            return "unknown"
        at = end
    return UPRIGHT if content[at + 1 : at + 2] == _SCAN else "unknown"


def _known(number: Any) -> int:
    return int(number) if number in _TRANSPOSES else UPRIGHT


def upright(image: Image.Image, turn: int) -> Image.Image:
    """A picture whose pixels have an orientation, upright."""
    return image.transpose(_TRANSPOSES[turn]) if turn in _TRANSPOSES else image


def upright_values(values: NDArray[Any], turn: int) -> NDArray[Any]:
    """`upright` for an array (H, W)."""
    if turn in SIDEWAYS:
        values = values.T
    if turn in (3, 4, 7, 8):
        values = values[::-1]
    return np.ascontiguousarray(values[:, ::-1] if turn in (2, 3, 6, 7) else values)
