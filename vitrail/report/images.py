"""Images embedded in a page: small data URIs within a size budget."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib as mpl
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.data.dataset import Split
from vitrail.data.loader import images
from vitrail.data.pixels import Pixels, to_pil
from vitrail.data.preprocess import Preprocess

ROOM = 3_000_000  # bytes of all images of a page, which keeps it below 5 MB
_FEW = 64  # sides below this are drawn with visible pixels
_TILE = 24  # minimum pixels of a tile's side
_GAP = 2  # pixels between tiles


@dataclass(frozen=True)
class InlineImage:
    """The attributes of an <img> element."""

    src: str
    width: int
    height: int
    few: bool  # drawn with visible pixels, without smoothing


class Album:
    """Encodes images until its budget is used up."""

    def __init__(self, room: int = ROOM):
        self.room = room

    def add(self, image: Image.Image, exact: bool = False) -> InlineImage | None:
        """The image as JPEG, or PNG if it is small or must be exact; None if it exceeds the budget."""
        few = max(image.size) < _FEW
        stream = io.BytesIO()
        if few or exact:
            image.save(stream, "PNG", optimize=True)
        else:
            image.convert("RGB").save(stream, "JPEG", quality=80, optimize=True)
        kind = "png" if few or exact else "jpeg"
        src = f"data:image/{kind};base64,{base64.b64encode(stream.getvalue()).decode()}"
        if len(src) > self.room:
            return None
        self.room -= len(src)
        return InlineImage(src, *image.size, few or exact)


def read(split: Split, numbers: Sequence[int], workers: int) -> dict[int, Pixels]:
    """Images of a split by index, each read once."""
    wanted = sorted(set(numbers))
    return dict(zip(wanted, images(split.reader(np.array(wanted)), workers, wanted), strict=True)) if wanted else {}


def seen(image: Pixels, preprocess: Preprocess, side: int) -> Image.Image:
    """The preprocessed image as the model sees it, resized to this longer side."""
    view = to_pil(np.ascontiguousarray(preprocess.pixels(image).transpose(1, 2, 0))).convert("RGB")
    scale = side / max(view.size)
    size = max(round(view.width * scale), 1), max(round(view.height * scale), 1)
    return view.resize(size, Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS)


def overlay(view: Image.Image, attention: NDArray[np.floating]) -> Image.Image:
    """A grey image under a heat map of attention or relevance."""
    grey = np.asarray(view.convert("L"), np.float32)[..., None] / 255
    values = attention.astype(np.float32) - attention.min()
    values /= max(float(values.max()), 1e-12)
    smooth = np.asarray(Image.fromarray(values).resize(view.size, Image.Resampling.BICUBIC)).clip(0, 1)
    glow = mpl.colormaps["inferno"](0.12 + 0.85 * smooth)[..., :3]
    mixed = 0.4 * grey * (0.35 + 0.65 * smooth[..., None]) + 0.6 * glow
    return Image.fromarray(np.rint(255 * mixed).clip(0, 255).astype(np.uint8))


def laid_over(image: Pixels, layer: Image.Image, side: int) -> Image.Image:
    """An image with a transparent picture of the same size over it, such as a mask, no larger than this side."""
    whole = to_pil(image).convert("RGBA")
    whole.alpha_composite(layer)
    whole.thumbnail((side, side), Image.Resampling.LANCZOS)
    return whole.convert("RGB")


def tiles(values: NDArray[np.floating], across: int) -> Image.Image:
    """Arrays (count, h, w, C) as a sheet of tiles, each scaled separately."""
    views = [np.asarray(to_pil(np.ascontiguousarray(tile, np.float32)).convert("RGBA")) for tile in values]
    views += [np.zeros_like(views[0])] * (-len(views) % across)
    return _sheet(np.stack(views).reshape(-1, across, *views[0].shape))


def similarities(values: NDArray[np.floating], largest: int = 16) -> Image.Image:
    """One tile per patch (h, w) with its similarity to all patches, (h, w, h, w); a selection of large grids."""
    step = [max(-(-side // largest), 1) for side in values.shape[:2]]
    shown = values[:: step[0], :: step[1]].clip(-1, 1)
    return _sheet(mpl.colormaps["viridis"]((shown + 1) / 2, bytes=True))


def _sheet(tiles: NDArray[np.uint8]) -> Image.Image:
    """Tiles (rows, columns, h, w, 4) as one image, with thin transparent gaps."""
    rows, columns, h, w, _ = tiles.shape
    zoom = max(_TILE // max(h, w), 1)
    tiles = tiles.repeat(zoom, axis=2).repeat(zoom, axis=3)
    h, w = h * zoom, w * zoom
    sheet = np.zeros((rows, h + _GAP, columns, w + _GAP, 4), np.uint8)
    sheet[:, :h, :, :w] = tiles.transpose(0, 2, 1, 3, 4)
    whole = sheet.reshape(rows * (h + _GAP), columns * (w + _GAP), 4)[:-_GAP, :-_GAP]
    return Image.fromarray(np.ascontiguousarray(whole))
