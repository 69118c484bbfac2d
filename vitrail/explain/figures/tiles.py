"""Shared by the figures: colour maps, enlarged pictures, numbered tiles."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from numpy.typing import NDArray

from vitrail.charts.style import BLUE, ORANGE

Array = NDArray[np.float32]
View = NDArray[np.uint8]  # h w 3

# Perceptually uniform, so readable in greyscale too.
HEAT, MARK = "inferno", "#56B4E9"
SIMILARITY = "viridis"
SIGNED = LinearSegmentedColormap.from_list(
    "signed", [(0, "#6E2C00"), (0.25, ORANGE), (0.5, "#F7F7F7"), (0.75, BLUE), (1, "#06365C")]
)

_SIDE = 224  # minimum side of enlarged pictures
_TILE = 48  # minimum pixels of a tile's longer side


def enlarge(view: View) -> View:
    """Enlarges a small picture by repeating pixels, without interpolation."""
    times = -(-_SIDE // min(view.shape[:2]))
    return view.repeat(times, axis=0).repeat(times, axis=1)


def spacing(h: int, w: int) -> tuple[int, int, int]:
    """Height and width of an enlarged tile and of the gap between tiles, in pixels."""
    times = -(-_TILE // max(h, w))
    return h * times, w * times, max(max(h, w) * times // 16, 1)


def draw_tiles(axes: Axes, tiles: Array, **colours: Any) -> AxesImage:
    """Draws tiles (R, C, h, w), or in colour (R, C, h, w, 3), with white gaps."""
    rows, columns, h, w = tiles.shape[:4]
    tall, wide, gap = spacing(h, w)
    nothing = 1.0 if tiles.ndim == 5 else np.nan
    whole = np.full((rows * (tall + gap) - gap, columns * (wide + gap) - gap, *tiles.shape[4:]), nothing, np.float32)
    large = tiles.repeat(tall // h, axis=2).repeat(wide // w, axis=3)
    for row in range(rows):
        for column in range(columns):
            y, x = row * (tall + gap), column * (wide + gap)
            whole[y : y + tall, x : x + wide] = large[row, column]
    axes.grid(False)
    axes.spines[:].set_visible(False)
    extent = (0, whole.shape[1], whole.shape[0], 0)
    return axes.imshow(whole, extent=extent, interpolation="nearest", **colours)


def number_tiles(
    axes: Axes,
    rows: int,
    columns: int,
    row: str,
    column: str,
    first: int = 0,
    names: tuple[NDArray[Any], NDArray[Any]] | None = None,
) -> None:
    """Labels the rows and columns of tiles with their numbers."""
    bottom, right = axes.get_ylim()[0], axes.get_xlim()[1]
    down, across = names or (np.arange(rows) + first, np.arange(columns) + first)
    axes.set_yticks((np.arange(rows) + 0.5) * bottom / rows, down, fontsize=7.5)
    axes.set_xticks((np.arange(columns) + 0.5) * right / columns, across, fontsize=7.5)
    axes.set_ylabel(row)
    axes.set_xlabel(column)


def colour_bar(figure: Figure, axes: Axes, image: AxesImage, label: str) -> None:
    """Adds a narrow colour bar at the right, without a frame."""
    bar = figure.colorbar(image, ax=axes, shrink=0.8, aspect=28, pad=0.02)
    bar.outline.set_visible(False)  # type: ignore[operator]  # matplotlib calls it a Spine
    bar.ax.tick_params(labelsize=8)
    bar.set_label(label, fontsize=8)
