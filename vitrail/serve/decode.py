"""From the bytes of an image to the model's pixels, in memory and within the limits.

The same reading and preprocessing as in `vitrail predict`. Before anything is decoded, the header must be that of a
raster image with an acceptable number of pixels.
"""

from __future__ import annotations

from vitrail.data.images import Pixels, UnreadableImage, read_header
from vitrail.data.preprocess import Preprocess
from vitrail.errors import UserError
from vitrail.runs.predictor import Predictor
from vitrail.serve.errors import ApiError
from vitrail.tasks.placement import Placement

_MARKUP = {
    b"<svg": "an SVG drawing",
    b"<?xml": "an XML document",
    b"<!doctype": "an HTML page",
    b"<html": "an HTML page",
}
_SCAN = b"\xff\xda"  # starts a scan of a JPEG; inside of one, 0xff is followed by 0x00
_MAX_SCANS = 64  # a progressive JPEG has about ten; thousands keep a decoder busy for minutes
_EIGHT_BIT = 8


def decode(predictor: Predictor, content: bytes, max_pixels: int) -> tuple[Pixels, Placement]:
    """An image as input of the model, (C, H, W), and how it was placed into it; raises ApiError."""
    _check(content, predictor.card.preprocess, max_pixels)
    try:
        return predictor.placed(content)
    except (UnreadableImage, UserError) as error:
        raise ApiError(422, "unreadable_image", f"The image cannot be read: {error}.") from error


def _check(content: bytes, wanted: Preprocess, max_pixels: int) -> None:
    """Refuses what need not be decoded."""
    if not content:
        raise ApiError(422, "empty_image", "The image is empty: it has 0 bytes.")
    start = content[:512].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    what = next((what for tag, what in _MARKUP.items() if start.startswith(tag)), None)
    try:
        format, h, w = read_header(content)
    except UnreadableImage as error:
        if "pixels" in str(error):
            raise _too_large(max_pixels) from error
        said = f"This is {what}" if what else "The format is not known" if "not an" in str(error) else f"It is {error}"
        raise ApiError(415, "not_an_image", f"{said}. Send a raster image, such as JPEG, PNG or WebP.") from error
    if format == "NPY" and wanted.channels in (1, 3, 4) and wanted.bits == _EIGHT_BIT:
        raise ApiError(
            415, "not_an_image", "Arrays are accepted by models of multi-band images only. Send JPEG or PNG."
        )
    if h * w > max_pixels:
        raise _too_large(max_pixels, f"{w} × {h}")
    if format == "JPEG" and content.count(_SCAN) > _MAX_SCANS:
        raise ApiError(422, "unreadable_image", f"The JPEG has more than {_MAX_SCANS} scans. Save it again.")


def _too_large(max_pixels: int, given: str = "") -> ApiError:
    but = f", but this one has {given}" if given else ""
    most = f"An image may have at most {max_pixels / 1e6:g} megapixels{but}."
    return ApiError(413, "too_many_pixels", f"{most} Make it smaller.")
