"""Reads image files: pictures as a person sees them, upright and on white; NumPy files and TIFF bands as they are."""

from __future__ import annotations

import hashlib
import io
import math
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

try:
    import simplejpeg
except ImportError:  # the extra `fast`; Pillow takes half as long again for the same pixels
    simplejpeg = None

from vitrail.data.multiband import Bands, read_bands
from vitrail.data.pixels import NAMES, bits_of, fit, floats, picture
from vitrail.data.pixels import Pixels as Pixels
from vitrail.data.pixels import UnreadableImage as UnreadableImage

# Named, because Pillow would otherwise try all formats it knows on any file, and start Ghostscript for one.
# `init` registers them here, before threads could do it at the same time.
Image.init()
_FORMATS = tuple(
    kind
    for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "JPEG2000", "AVIF")
    if kind in Image.OPEN
)
_FORMAT_OF: dict[str, str] = {".npy": "NPY"}
_FORMAT_OF |= {end.lower(): kind for end, kind in Image.registered_extensions().items() if kind in _FORMATS}
EXTENSIONS = frozenset(_FORMAT_OF)
THUMBNAIL = 16  # side

_JPEG, _SCAN = b"\xff\xd8", b"\xda"  # how a JPEG begins, and where its pixels do

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


@dataclass(frozen=True)
class ImageFacts:
    """The size of an image as a person sees it, whether it is without colour, or how many bands it has."""

    h: int
    w: int
    grey: bool
    bands: int = 0  # of an image that is neither grey nor colour
    bits: int = 8  # of a value: 8, 16, or 32 for floats

    @property
    def kind(self) -> str:
        """In words, what must not be mixed: pictures, bands of one number, floats of one number."""
        what = f"{self.bands} bands" if self.bands else "grey or colour"
        return f"{what}, floats" if self.bits == 32 else what


@dataclass(frozen=True)
class Survey:
    """What an audit wants to know of an image."""

    h: int
    w: int
    format: str  # what the content is, in Pillow's words
    mode: str  # in Pillow's words, or "5 bands"
    digest: bytes  # of the file, or of pixels that are in no file
    kind: str = "grey or colour"  # as ImageFacts has it


def read_image(
    source: str | Path | bytes, channels: int | None = None, bits: int | None = None, least: int | None = None
) -> Pixels:
    """The pixels of an image file or of its content, (H, W, C), as stored or with as many channels and bits as given.

    Stored, a grey picture has one channel and any other picture three: what is transparent is white, unless four
    channels are asked for. A NumPy or TIFF file has as many as there are in it. With `least`, a picture comes at a
    half, a quarter or an eighth of its size if its shorter side keeps that many pixels; that is cheaper to decode
    and to keep.
    """
    if (decoded := _decode_jpeg(source, least)) is not None:
        return fit(decoded, channels, bits)
    with _opened(source) as image:
        if isinstance(image, Bands):
            return fit(image.pixels, channels, bits)
        return picture_pixels(image, channels, bits, least)


def picture_pixels(
    image: Image.Image, channels: int | None = None, bits: int | None = None, least: int | None = None
) -> Pixels:
    """The pixels of a picture that Pillow has opened, as `read_image` gives them."""
    grey, factor = _is_grey(image), _reduction(*image.size, least)
    small = factor > 1 and image.draft(None, (image.width // factor, image.height // factor))
    image.load()
    turn = _turn(image)
    deep = _bits(image) > 8
    image = _plain(image, grey, alpha=channels == 4)
    if factor > 1 and not small and not deep:
        image = image.reduce(factor)
    if channels in (1, 3) and image.mode in ("L", "RGB"):
        image = image.convert("L" if channels == 1 else "RGB")
    if turn is not None:
        image = image.transpose(turn)
    pixels = np.array(image)
    return fit(pixels if pixels.ndim == 3 else pixels[:, :, None], channels, bits)


def inspect_image(source: str | Path | bytes) -> ImageFacts:
    """Proves that the whole image decodes, in small where the format can, and says what it is."""
    with _opened(source) as image:
        if isinstance(image, Bands):
            return facts_of(image.pixels)
        grey = _is_grey(image)
        full = image.size
        drafted = image.draft("L", (1, 1)) is not None
        image.load()
        w, h = full if drafted else image.size  # a TIFF file turns itself as it loads
        if _turn(image) in _SIDEWAYS:
            h, w = w, h
        return ImageFacts(h, w, grey, bits=_bits(image))


def facts_of(image: Pixels) -> ImageFacts:
    """What an image (H, W, C) in memory is."""
    h, w, channels = image.shape
    return ImageFacts(h, w, channels == 1, 0 if channels in (1, 3) else channels, bits_of(image))


def survey_image(source: str | Path | bytes) -> tuple[Survey, Pixels]:
    """What `inspect_image` proves and says, and more, with a thumbnail as a person sees it."""
    with _opened(source) as image:
        content = source if isinstance(source, bytes) else Path(source).read_bytes()
        digest = hashlib.blake2b(content, digest_size=16).digest()
        if isinstance(image, Bands):
            return survey_pixels(image.pixels, image.format, digest)
        kind, mode, full = _content(image), image.mode, image.size
        draft = image.draft("L", (2 * THUMBNAIL, 2 * THUMBNAIL))
        image.load()
        w, h = full if draft else image.size  # a TIFF file turns itself as it loads
        turn, grey, bits = _turn(image), _is_grey(image), _bits(image)
        plain = _plain(image, grey)
        if bits > 8:
            plain = picture(np.array(plain)[:, :, None])
        small = thumbnail(plain, turn, draft[1] if draft else None)
    if turn in _SIDEWAYS:
        h, w = w, h
    return Survey(h, w, kind, mode, digest, ImageFacts(h, w, grey, bits=bits).kind), small


def survey_pixels(image: Pixels, format: str = "", digest: bytes | None = None) -> tuple[Survey, Pixels]:
    """The survey of an image (H, W, C) in memory, and its thumbnail."""
    facts, view = facts_of(image), picture(image)
    if digest is None:
        digest = hashlib.blake2b(np.ascontiguousarray(image).data, digest_size=16).digest()
    mode = view.mode
    if facts.bands or facts.bits > 8:
        what = f"{facts.bands} bands" if facts.bands else "grey" if facts.grey else "colour"
        mode = f"{NAMES[facts.bits]} {what}"
    return Survey(facts.h, facts.w, format, mode, digest, facts.kind), thumbnail(view)


def thumbnail(
    image: Image.Image,
    turn: Image.Transpose | None = None,
    box: tuple[float, float, float, float] | None = None,
) -> Pixels:
    """A small grey square of an image in mode L or RGB, or of a box in it, turned upright."""
    small = image.resize((THUMBNAIL, THUMBNAIL), Image.Resampling.BILINEAR, box).convert("L")
    return np.array(small if turn is None else small.transpose(turn))


def image_format(path: str | Path) -> str | None:
    """The format of a file whatever its name, by its first bytes; None if it is no image."""
    try:
        with _opened(path) as image:
            return _content(image)
    except UnreadableImage:
        return None


def expected_format(path: str | Path) -> str | None:
    """The format that the end of a file's name stands for; None if it is none of an image."""
    return _FORMAT_OF.get(Path(path).suffix.lower())


def _content(image: Image.Image | Bands) -> str:
    """The format of an open image; a JPEG with a second picture behind it, as cameras write, is a JPEG."""
    return "JPEG" if image.format == "MPO" else image.format or ""


@contextmanager
def _opened(source: str | Path | bytes) -> Iterator[Image.Image | Bands]:
    """An open picture, or the bands of what is none; whatever goes wrong, then or later, is an UnreadableImage."""
    try:
        if not isinstance(source, bytes) and Path(source).is_dir():
            raise UnreadableImage("a folder")
        with io.BytesIO(source) if isinstance(source, bytes) else Path(source).open("rb") as file, _quiet():
            if not file.read(1):
                raise UnreadableImage("empty file")
            if (bands := read_bands(file)) is not None:
                yield bands
            else:
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


def _reduction(width: int, height: int, least: int | None) -> int:
    """How many times smaller an image may be read: 1, 2, 4 or 8."""
    return 1 if least is None else max(f for f in (1, 2, 4, 8) if f == 1 or min(width, height) >= f * least)


def _decode_jpeg(source: str | Path | bytes, least: int | None) -> Pixels | None:
    """The pixels of a plain JPEG, upright, bit for bit Pillow's in half the time; None if Pillow has to see to it."""
    if simplejpeg is None:
        return None
    try:
        content = source if isinstance(source, bytes) else _content_if_jpeg(Path(source))
        if not content.startswith(_JPEG):
            return None
        h, w, colours, _ = simplejpeg.decode_jpeg_header(content)
        turn = _jpeg_turn(content)
        if colours not in ("Gray", "YCbCr", "RGB") or turn == "unknown" or h * w > (Image.MAX_IMAGE_PIXELS or math.inf):
            return None
        factor = _reduction(w, h, least)
        pixels: Pixels = simplejpeg.decode_jpeg(
            content, "GRAY" if colours == "Gray" else "RGB", min_height=-(-h // factor), min_width=-(-w // factor)
        )
    except (OSError, ValueError):  # damaged or unusual: Pillow reads it, or says what is wrong
        return None
    if turn is None:
        return pixels
    upright = np.array(Image.fromarray(pixels[:, :, 0] if colours == "Gray" else pixels).transpose(turn))
    return upright if upright.ndim == 3 else upright[:, :, None]


def _content_if_jpeg(path: Path) -> bytes:
    """What a JPEG file holds; of other files the first bytes."""
    with path.open("rb") as file:
        first = file.read(len(_JPEG))
        return first + file.read() if first == _JPEG else first


def _jpeg_turn(content: bytes) -> Image.Transpose | Literal["unknown"] | None:
    """What makes a JPEG upright, by the EXIF data before its pixels; unknown if something else might say it."""
    at = len(_JPEG)
    while content[at : at + 1] == b"\xff" and content[at + 1 : at + 2] != _SCAN:
        end = at + 2 + int.from_bytes(content[at + 2 : at + 4], "big")
        segment = content[at + 4 : end]
        if segment.startswith(b"Exif\0\0"):
            exif = Image.Exif()
            try:
                exif.load(segment)
                number = exif.get(ExifTags.Base.Orientation)
            except Exception:  # as in `_turn`
                return "unknown"
            if number is not None:
                return _TURNS.get(number)
        elif b"tiff:Orientation" in segment:  # XMP, which Pillow asks if EXIF does not tell
            return "unknown"
        at = end
    return None if content[at + 1 : at + 2] == _SCAN else "unknown"


def _is_grey(image: Image.Image) -> bool:
    return image.mode in ("1", "L", "LA", "La", "I", "F") or image.mode.startswith("I;16")


def _turn(image: Image.Image) -> Image.Transpose | None:
    """What makes a loaded image upright, by its EXIF data."""
    try:
        return _TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # broken EXIF data says nothing, and the pixels are good without it
        return None


def _bits(image: Image.Image) -> int:
    """The bits of a picture's values: 8, 16, or 32 for the numbers that a TIFF file may hold."""
    if image.mode == "I":
        return 32 if image.format == "TIFF" else 16  # PNG and PGM have no more
    return 32 if image.mode == "F" else 16 if image.mode.startswith("I;16") else 8


def _plain(image: Image.Image, grey: bool, alpha: bool = False) -> Image.Image:
    """A loaded image in mode L or RGB, RGBA to keep `alpha`, I;16 or F if it is deep."""
    bits = _bits(image)
    if bits == 16:
        return Image.fromarray(np.asarray(image).astype(np.uint16))
    if bits == 32:
        return Image.fromarray(floats(np.asarray(image)))
    if alpha:
        return image.convert("RGBA")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        return image.getchannel("R") if grey else image.convert("RGB")
    return image.convert("L" if grey else "RGB")
