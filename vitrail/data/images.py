"""Image files to pixels: pictures upright (EXIF) and composited on white, NumPy and multi-band TIFF files unchanged."""

from __future__ import annotations

import hashlib
import io
import math
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

try:
    import simplejpeg
except ImportError:  # the extra `fast`; Pillow gives the same pixels at two thirds of the speed
    simplejpeg = None

from vitrail.data.multiband import Bands, read_band_header, read_bands
from vitrail.data.orientation import SIDEWAYS, UPRIGHT, jpeg_orientation, orientation, upright
from vitrail.data.pixels import BIT_DEPTHS, JPEG, bits_of, check_length, fit, to_float32, to_pil
from vitrail.data.pixels import Pixels as Pixels
from vitrail.data.pixels import UnreadableImage as UnreadableImage
from vitrail.data.remote import fetched
from vitrail.errors import UserError, first_line
from vitrail.files import open_regular

with suppress(ImportError):  # the extra `heic`
    import pillow_heif

    pillow_heif.register_heif_opener()
with suppress(ImportError):  # the extra `jxl`; importing it registers it
    import pillow_jxl  # noqa: F401

# Listed, because Pillow would otherwise try every plugin on every file, and one of them starts Ghostscript.
# `init` registers the plugins now, before several threads could do so at once.
Image.init()
FORMATS = tuple(
    kind
    for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "JPEG2000", "AVIF", "HEIF", "JXL")
    if kind in Image.OPEN
)
# Formats that need a plugin. Their files are images even without it, so that none is skipped unnoticed.
_PLUGINS = {
    "HEIF": ((".heic", ".heif", ".hif"), "HEIC, which needs pillow-heif: pip install 'vitrail[heic]'"),
    "JXL": ((".jxl",), "JPEG XL, which needs a plugin: pip install 'vitrail[jxl]'"),
    "AVIF": ((".avif",), "AVIF, which needs Pillow 11.3 or newer: pip install -U pillow"),
}
_FORMAT_OF: dict[str, str] = {".npy": "NPY"}
_FORMAT_OF |= {end: kind for kind, (ends, _) in _PLUGINS.items() for end in ends}
_FORMAT_OF |= {end.lower(): kind for end, kind in Image.registered_extensions().items() if kind in FORMATS}
EXTENSIONS = frozenset(_FORMAT_OF)
THUMBNAIL = 16  # side


_PILLOW_WARNINGS = ("ignore", None, Warning, re.compile(r"PIL\."), 0)


@dataclass(frozen=True)
class ImageFacts:
    """The size (upright), channels, bit depth and EXIF orientation of an image."""

    h: int
    w: int
    grey: bool  # grayscale
    bands: int = 0  # of a multi-band image, else 0
    bits: int = 8  # bit depth: 8, 16, or 32 for floats
    turn: int = UPRIGHT  # EXIF orientation of the stored pixels

    @property
    def kind(self) -> str:
        """What must not be mixed in a data set: "grey or colour", or the number of bands, integers or floats."""
        what = f"{self.bands} bands" if self.bands else "grey or colour"
        return f"{what}, floats" if self.bits == 32 else what


@dataclass(frozen=True)
class Survey:
    """The properties of an image that the audit compares."""

    h: int
    w: int
    format: str  # by content; Pillow's name
    mode: str  # Pillow's mode, or e.g. "8-bit 5 bands"
    digest: bytes  # of the file, or of the pixels where there is no file
    kind: str = "grey or colour"  # see ImageFacts.kind


def read_image(
    source: str | Path | bytes, channels: int | None = None, bits: int | None = None, min_side: int | None = None
) -> Pixels:
    """The pixels (H, W, C) of an image file or of its content, converted to `channels` and `bits` if given.

    By default a grayscale picture has one channel and any other picture three, with transparency composited on white
    unless `channels` is 4; NumPy and TIFF files keep their channels. With `min_side`, a picture is read at 1/2, 1/4
    or 1/8 of its size as long as its shorter side keeps that many pixels, which saves time and memory.
    """
    source = fetched(source)
    if (decoded := _decode_jpeg(source, min_side)) is not None:
        return fit(decoded, channels, bits)
    with _opened(source) as image:
        if isinstance(image, Bands):
            return fit(image.pixels, channels, bits)
        return picture_pixels(image, channels, bits, min_side)


def picture_pixels(
    image: Image.Image, channels: int | None = None, bits: int | None = None, min_side: int | None = None
) -> Pixels:
    """`read_image` for a picture opened with Pillow."""
    grey, factor = _is_grey(image), _reduction(*image.size, min_side)
    small = factor > 1 and image.draft(None, (image.width // factor, image.height // factor))
    image.load()
    turn = orientation(image)
    deep = _bits(image) > 8
    image = _plain(image, grey, alpha=channels == 4)
    if factor > 1 and not small and not deep:
        image = image.reduce(factor)
    if channels in (1, 3) and image.mode in ("L", "RGB"):
        image = image.convert("L" if channels == 1 else "RGB")
    pixels = np.array(upright(image, turn))
    return fit(pixels if pixels.ndim == 3 else pixels[:, :, None], channels, bits)


def read_header(content: bytes) -> tuple[str, int, int]:
    """The format, height and width that the header of an image states, without decoding; raises UnreadableImage."""
    with failures(), io.BytesIO(content) as file:
        opened = read_band_header(file) or Image.open(file, formats=FORMATS)
        return opened if isinstance(opened, tuple) else (_content(opened), opened.height, opened.width)


def inspect_image(source: str | Path | bytes) -> ImageFacts:
    """Decodes the whole image, at reduced size where the format allows, to verify it; returns its facts."""
    with _opened(source) as image:
        if isinstance(image, Bands):
            return facts_of(image.pixels)
        grey = _is_grey(image)
        full, rotated = image.size, image.format == "TIFF"  # Pillow rotates TIFF files on loading
        turn = orientation(image) if rotated else UPRIGHT
        drafted = image.draft("L", (1, 1)) is not None
        image.load()
        w, h = full if drafted else image.size
        if not rotated and (turn := orientation(image)) in SIDEWAYS:
            h, w = w, h
        return ImageFacts(h, w, grey, bits=_bits(image), turn=turn)


def facts_of(image: Pixels) -> ImageFacts:
    """The facts of an image (H, W, C) in memory."""
    h, w, channels = image.shape
    return ImageFacts(h, w, channels == 1, 0 if channels in (1, 3) else channels, bits_of(image))


def survey_image(source: str | Path | bytes) -> tuple[Survey, Pixels]:
    """Verifies an image like `inspect_image`; returns its survey and an upright grayscale thumbnail."""
    with _opened(source) as image:
        content = source if isinstance(source, bytes) else Path(source).read_bytes()
        digest = hashlib.blake2b(content, digest_size=16).digest()
        if isinstance(image, Bands):
            return survey_pixels(image.pixels, image.format, digest)
        kind, mode, full = _content(image), image.mode, image.size
        draft = image.draft("L", (2 * THUMBNAIL, 2 * THUMBNAIL))
        image.load()
        w, h = full if draft else image.size  # Pillow rotates TIFF files on loading
        turn, grey, bits = orientation(image), _is_grey(image), _bits(image)
        plain = _plain(image, grey)
        if bits > 8:
            plain = to_pil(np.array(plain)[:, :, None])
        small = thumbnail(plain, turn, draft[1] if draft else None)
    if turn in SIDEWAYS:
        h, w = w, h
    return Survey(h, w, kind, mode, digest, ImageFacts(h, w, grey, bits=bits).kind), small


def survey_pixels(image: Pixels, format: str = "", digest: bytes | None = None) -> tuple[Survey, Pixels]:
    """The survey of an image (H, W, C) in memory, and its thumbnail."""
    facts, view = facts_of(image), to_pil(image)
    if digest is None:
        digest = hashlib.blake2b(np.ascontiguousarray(image).data, digest_size=16).digest()
    mode = view.mode
    if facts.bands or facts.bits > 8:
        what = f"{facts.bands} bands" if facts.bands else "grey" if facts.grey else "colour"
        mode = f"{BIT_DEPTHS[facts.bits]} {what}"
    return Survey(facts.h, facts.w, format, mode, digest, facts.kind), thumbnail(view)


def thumbnail(
    image: Image.Image,
    turn: int = UPRIGHT,
    box: tuple[float, float, float, float] | None = None,
) -> Pixels:
    """A small square grayscale version of an image in mode L or RGB, or of a box in it, turned upright."""
    small = image.resize((THUMBNAIL, THUMBNAIL), Image.Resampling.BILINEAR, box).convert("L")
    return np.array(upright(small, turn))


def image_format(source: str | Path | bytes) -> str | None:
    """The format of a file by its content; None if it is not an image."""
    try:
        with _opened(source) as image:
            return _content(image)
    except UnreadableImage:
        return None


def expected_format(path: str | Path) -> str | None:
    """The format of a file by its extension; None if that is not an image format."""
    return _FORMAT_OF.get(Path(path).suffix.lower())


def _content(image: Image.Image | Bands) -> str:
    """The format of an open image; MPO, a JPEG with further pictures appended by a camera, counts as JPEG."""
    return "JPEG" if image.format == "MPO" else image.format or ""


@contextmanager
def _opened(source: str | Path | bytes) -> Iterator[Image.Image | Bands]:
    """Yields an open picture or the bands of a multi-band file; all failures become UnreadableImage."""
    with failures(source), io.BytesIO(source) if isinstance(source, bytes) else open_regular(source) as file:
        if not file.read(1):
            raise UnreadableImage("empty file")
        if (bands := read_bands(file)) is not None:
            yield bands
        else:
            check_length(file)
            with Image.open(file, formats=FORMATS) as image:
                yield image


@contextmanager
def failures(source: str | Path | bytes = b"") -> Iterator[None]:
    """Turns every failure to read an image into UnreadableImage, and silences Pillow's warnings."""
    try:
        with _quiet():
            yield
    except UnreadableImage:
        raise
    except UnidentifiedImageError as error:
        raise UnreadableImage(_missing_plugin(source) or "not an image") from error
    except Image.DecompressionBombError as error:
        count = next(iter(re.findall(r"\d+", str(error))), "0")
        raise UnreadableImage(f"{int(count):,} pixels, above the limit: allow them by --max-pixels {count}") from error
    except MemoryError as error:
        raise UnreadableImage("too large for the memory") from error
    except Exception as error:  # Pillow's decoders raise nearly any exception on damaged files
        if isinstance(error, OSError) and error.strerror:
            raise UnreadableImage(error.strerror[0].lower() + error.strerror[1:]) from error
        reason = "truncated" if "truncated" in str(error).lower() else f"damaged ({first_line(error)})"
        raise UnreadableImage(reason) from error


def allow_pixels(most: int) -> None:
    """Sets the number of pixels above which an image is unreadable, for the whole process; Pillow's is 178,956,970.

    Small files that would decode to gigabytes are called decompression bombs.
    """
    if most < 1:
        raise UserError(f"'max_pixels' must be at least 1, but it is {most}.")
    Image.MAX_IMAGE_PIXELS = -(-most // 2)  # Pillow refuses images of more than twice this


def _missing_plugin(source: str | Path | bytes) -> str | None:
    """What the format of a file needs to be read, by its content or its extension; None if it needs nothing."""
    with io.BytesIO(source) if isinstance(source, bytes) else open_regular(source) as file:
        start = file.read(12)
    brand = start[8:] if start[4:8] == b"ftyp" else b""
    kind = "HEIF" if brand in (b"heic", b"heix", b"hevc", b"mif1", b"msf1") else "AVIF" if brand == b"avif" else None
    if start.startswith((b"\xff\x0a", b"\x00\x00\x00\x0cJXL ")):
        kind = "JXL"
    return _PLUGINS[kind][1] if kind is not None and kind not in FORMATS else None


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences Pillow's warnings: damaged files are reported as unreadable anyway.

    `warnings.catch_warnings` is not thread-safe: it replaces the filters of the whole process, and overlapping
    threads would restore each other's.
    """
    filters: list[object] = warnings.filters  # type: ignore[assignment]  # typed as a sequence, but is a list
    filters.insert(0, _PILLOW_WARNINGS)
    try:
        yield
    finally:
        filters.remove(_PILLOW_WARNINGS)


def _reduction(width: int, height: int, min_side: int | None) -> int:
    """The reduction factor at which an image may be read: 1, 2, 4 or 8."""
    return 1 if min_side is None else max(f for f in (1, 2, 4, 8) if f == 1 or min(width, height) >= f * min_side)


def _decode_jpeg(source: str | Path | bytes, min_side: int | None) -> Pixels | None:
    """The upright pixels of a plain JPEG, bit-identical to Pillow's but faster; None if Pillow must read it."""
    if simplejpeg is None:
        return None
    try:
        content = source if isinstance(source, bytes) else _content_if_jpeg(Path(source))
        if not content.startswith(JPEG):
            return None
        h, w, colours, _ = simplejpeg.decode_jpeg_header(content)
        turn = jpeg_orientation(content)
        if colours not in ("Gray", "YCbCr", "RGB") or turn == "unknown" or h * w > (Image.MAX_IMAGE_PIXELS or math.inf):
            return None
        factor = _reduction(w, h, min_side)
        pixels: Pixels = simplejpeg.decode_jpeg(
            content, "GRAY" if colours == "Gray" else "RGB", min_height=-(-h // factor), min_width=-(-w // factor)
        )
    except (OSError, ValueError, UnreadableImage):  # damaged or unusual: Pillow reads or reports it
        return None
    if turn == UPRIGHT:
        return pixels
    turned = np.array(upright(Image.fromarray(pixels[:, :, 0] if colours == "Gray" else pixels), turn))
    return turned if turned.ndim == 3 else turned[:, :, None]


def _content_if_jpeg(path: Path) -> bytes:
    """The content of a JPEG file, or the first bytes of any other file."""
    with open_regular(path) as file:
        if (first := file.read(len(JPEG))) != JPEG:
            return first
        check_length(file)
        return file.read()


def _is_grey(image: Image.Image) -> bool:
    return image.mode in ("1", "L", "LA", "La", "I", "F") or image.mode.startswith("I;16")


def _bits(image: Image.Image) -> int:
    """The bit depth of a picture: 8, 16, or 32 for 32-bit TIFF files."""
    if image.mode == "I":
        return 32 if image.format == "TIFF" else 16  # PNG and PGM have at most 16
    return 32 if image.mode == "F" else 16 if image.mode.startswith("I;16") else 8


def _plain(image: Image.Image, grey: bool, alpha: bool = False) -> Image.Image:
    """A loaded image in mode L or RGB, RGBA with `alpha`, or I;16 or F if it has more than 8 bits."""
    bits = _bits(image)
    if bits == 16:
        return Image.fromarray(np.asarray(image).astype(np.uint16))
    if bits == 32:
        return Image.fromarray(to_float32(np.asarray(image)))
    if alpha:
        return image.convert("RGBA")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        return image.getchannel("R") if grey else image.convert("RGB")
    return image.convert("L" if grey else "RGB")
