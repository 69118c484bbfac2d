"""The figures of an explanation: maps over pictures, and what a model's heads and weights show, in one style."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from vitrail.charts.style import BLUE, GREY, INK, ORANGE, heading, short, styled

Array = NDArray[np.float32]
View = NDArray[np.uint8]  # h w 3

# Both go from dark to light evenly, so that they are read without colour too.
HEAT, MARK = "inferno", "#56B4E9"
LIKE = "viridis"
SIGNED = LinearSegmentedColormap.from_list(
    "signed", [(0, "#6E2C00"), (0.25, ORANGE), (0.5, "#F7F7F7"), (0.75, BLUE), (1, "#06365C")]
)

_SIDE = 224  # pixels that pictures are enlarged to, at least
_TILE = 48  # pixels of a tile's longer side, at least
_PLACES = 14  # rows and columns of patches that have a tile of their own
_LEAST = 5.0  # inches that a title needs
_LAYERS, _HEADS = 24, 16  # of which maps are drawn, at most
_ACROSS = 3  # pictures in a row, each beside its map and its overlay


def enlarge(view: View) -> View:
    """A small picture with every pixel repeated, so that nothing is made up between them."""
    times = -(-_SIDE // min(view.shape[:2]))
    return view.repeat(times, axis=0).repeat(times, axis=1)


def overlay(view: View, weights: Array) -> View:
    """A picture that is bright where a map (h, w) is high, as in figure 6 of the paper; the map is smoothed."""
    picture = enlarge(view)
    smooth = F.interpolate(torch.from_numpy(weights)[None, None], picture.shape[:2], mode="bicubic")[0, 0]
    light = (smooth / weights.max()).clamp(0, 1).numpy()[:, :, None]
    return (picture * (0.08 + 0.92 * light)).astype(np.uint8)


def heat(weights: Array, size: tuple[int, ...]) -> View:
    """A map (h, w) in colours from dark to light, its patches as large as they are in a picture of this size."""
    h, w = weights.shape
    y, x = np.arange(size[0]) * h // size[0], np.arange(size[1]) * w // size[1]
    colours = colormaps[HEAT](weights / weights.max(), bytes=True)[:, :, :3]
    return colours[y][:, x]


@styled
def rollouts(views: Sequence[View], maps: Array, captions: Sequence[str], wrong: Sequence[bool] = ()) -> Figure:
    """Pictures with their maps (B, h, w): the picture, the map, and the picture where it is attended to."""
    across = min(_ACROSS, len(views))
    down = -(-len(views) // across)
    h, w = enlarge(views[0]).shape[:2]
    gap = w // 20
    wide, head, caption, apart = 4.0, 0.6, 0.22, 0.14  # inches; a picture, its map and its overlay are one image
    tall = wide * h / (3 * w + 2 * gap)
    width, height = across * (wide + apart) - apart, head + down * (caption + tall + apart) - apart
    figure = Figure(figsize=(width, height))
    figure.text(0, 1 - 0.1 / height, "Attention rollout", fontsize=11, fontweight="bold", va="center")
    note = "from none (dark) to the most (light); a peak of 1× would be all patches alike"
    figure.text(0, 1 - 0.35 / height, note, color=GREY, va="center")
    for i, (view, weights) in enumerate(zip(views, maps, strict=True)):
        x, y = i % across * (wide + apart), head + i // across * (caption + tall + apart) + caption
        axes = figure.add_axes((x / width, 1 - (y + tall) / height, wide / width, tall / height))
        white = np.full((h, gap, 3), 255, np.uint8)
        panes = [enlarge(view), white, heat(weights, (h, w)), white, overlay(view, weights)]
        axes.imshow(np.concatenate(panes, axis=1), aspect="auto", interpolation="antialiased")
        axes.set_axis_off()
        wrongly = i < len(wrong) and wrong[i]
        axes.set_title(short(captions[i], 40), fontsize=8.5, weight="normal", pad=3, color=ORANGE if wrongly else INK)
        peak = f"peak {weights.max() * weights.size:.1f}×"
        axes.set_title(peak, loc="right", fontsize=7, weight="normal", pad=3, color=GREY)
    return figure


@styled
def heads(
    view: View,
    maps: Sequence[Array],
    caption: str,
    looks: str = "from the class token",
    patch: tuple[int, int] | None = None,
) -> Figure:
    """Where every head of every layer looks in a picture, L times (H, h, w); the patch that looks is marked.

    Later layers may have coarser grids and more heads: a patch of theirs covers those that were merged in it.
    """
    layers = np.unique(np.linspace(0, len(maps) - 1, min(len(maps), _LAYERS)).round().astype(int))
    count = min(max(len(of_layer) for of_layer in maps), _HEADS)
    h, w = maps[0].shape[1:]
    tiles = np.full((len(layers), count, h, w), np.nan, np.float32)
    for row, layer in enumerate(layers):
        shown = maps[layer][:count]
        scaled = shown / np.maximum(shown.max(axis=(1, 2), keepdims=True), 1e-12)
        tiles[row, : len(shown)] = _refined(scaled, (h, w))
    aspect = view.shape[0] / view.shape[1]
    tile = min(max(7.5 / count, 0.42), 0.9)  # inches
    across, down = tile * count, tile * aspect * len(layers)
    side = min(max(down, 1.6), 2.6)
    widths = [max(side / aspect, 1.8), max(across, 3.6)]  # titles need room beside narrow pictures too
    figure = Figure(figsize=(sum(widths) + 1.1, max(down, side) + 1.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=widths)
    heading(left, short(caption, 24), "")
    left.imshow(enlarge(view), extent=(0, w, h, 0), interpolation="antialiased")
    left.set_axis_off()
    left.set_anchor("NW")
    heading(right, f"Attention {looks}", _left_out(maps, len(layers), count))
    _tiles(right, tiles, cmap=HEAT, vmin=0, vmax=1)
    _number(right, len(layers), count, "layer", "head", names=(_named(maps, layers), np.arange(count) + 1))
    right.set_anchor("NW")
    if patch is not None:
        _mark(left, patch, 1, 1, 2.0)
        tall, wide, gap = _spacing(h, w)
        for row, layer in enumerate(layers):
            times = _times(maps[layer].shape[1:], (h, w))
            y, x = (place // n * n for place, n in zip(patch, times, strict=True))
            covered = min(times[0], h - y), min(times[1], w - x)  # the last patch of a side may cover fewer
            for column in range(min(len(maps[layer]), count)):
                corner = row * (tall + gap) + y * tall / h, column * (wide + gap) + x * wide / w
                _mark(right, corner, covered[0] * tall / h, covered[1] * wide / w, 0.8)
    return figure


def _left_out(maps: Sequence[Array], layers: int, count: int) -> str:
    """What the colours mean, and how much of all layers and heads is drawn."""
    most = max(len(of_layer) for of_layer in maps)
    some = [f"{layers} of {len(maps)} layers"] if layers < len(maps) else []
    some += [f"{count} of up to {most} heads"] if count < most else []
    return "each head by itself, from none (dark) to its most (light)" + "".join(f"; {words}" for words in some)


def _named(maps: Sequence[Array], layers: NDArray[Any]) -> NDArray[Any]:
    """Numbers of layers, with their grids where these are not all the same."""
    grids = [of_layer.shape[1:] for of_layer in maps]
    return np.array([f"{i + 1}" if len(set(grids)) == 1 else "{}×{}   {}".format(*grids[i], i + 1) for i in layers])


def _times(coarse: tuple[int, ...], fine: tuple[int, ...]) -> tuple[int, int]:
    """How many patches of the first stage a patch of a later one covers a side: stages halve, and round up."""
    down, across = (2 ** math.ceil(math.log2(n / m)) for m, n in zip(coarse, fine, strict=True))
    return down, across


def _refined(maps: Array, grid: tuple[int, int]) -> Array:
    """Maps (..., h, w) of any stage on the grid of the first one."""
    down, across = _times(maps.shape[-2:], grid)
    return maps.repeat(down, axis=-2).repeat(across, axis=-1)[..., : grid[0], : grid[1]]


@styled
def similarity(alike: Array, where: str = "") -> Figure:
    """A tile for every patch: how alike its position embedding is to those of all patches, (h, w, h, w)."""
    h, w = alike.shape[:2]
    rows, columns = (np.unique(np.linspace(0, n - 1, min(n, _PLACES)).round().astype(int)) for n in (h, w))
    tile = min(6.4 / max(len(rows), len(columns)), 0.9)
    figure = Figure(
        figsize=(max(tile * len(columns) + 1.6, _LEAST), tile * len(rows) * h / w + 1.2), layout="constrained"
    )
    axes = figure.add_subplot()
    heading(
        axes, f"Similarity of position embeddings{where}", f"a tile for each patch, with its likeness to all {h} × {w}"
    )
    others = alike.reshape(h * w, h * w)[~np.eye(h * w, dtype=bool)]
    low, high = (float(others.min()), float(others.max())) if others.size else (0.0, 1.0)
    image = _tiles(axes, alike[np.ix_(rows, columns)], cmap=LIKE, vmin=low, vmax=high)
    _number(axes, len(rows), len(columns), "patch row", "patch column", names=(rows, columns))
    _bar(figure, axes, image, "cosine similarity (a patch to itself is 1)")
    return figure


@styled
def bias(tables: Array, where: str = "") -> Figure:
    """What relative positions add for a patch at each place around the one that looks: (L, H, 2h-1, 2w-1)."""
    layers, count, h, w = tables.shape
    tile = min(max(6.4 / count, 0.45), 1.1)
    figure = Figure(figsize=(max(tile * count + 1.7, _LEAST), tile * layers * h / w + 1.2), layout="constrained")
    axes = figure.add_subplot()
    heading(axes, f"Relative position biases{where}", "the patch that looks is in the middle of a tile")
    most = max(float(np.abs(tables).max()), 1e-12)
    image = _tiles(axes, tables, cmap=SIGNED, vmin=-most, vmax=most)
    _number(axes, layers, count, "layer", "head", first=1)
    _bar(figure, axes, image, "added to the attention's logit")
    return figure


@styled
def filters(components: Array, title: str = "Patch filters", kind: str = "principal components") -> Figure:
    """Filters or their principal components, (count, p, p, C), each by itself from its least to its most.

    Those of three channels are in colour; of any other number there is a row for each one, a tile for each band.
    """
    count, _, _, channels = components.shape
    most = np.maximum(np.abs(components).max(axis=(1, 2, 3), keepdims=True), 1e-12)  # a filter may have died
    scaled = components / most / 2 + 0.5
    plain = channels in (1, 3)
    columns = min(7, count) if plain else channels
    rows = -(-count // columns) if plain else count
    tile = 0.8 if plain else 0.45
    figure = Figure(figsize=(max(tile * columns + 0.6, _LEAST), tile * rows + 1), layout="constrained")
    axes = figure.add_subplot()
    heading(axes, title, f"first {count} {kind}, " + ("each by itself" if plain else "a row each"))
    if plain:
        blank = np.ones((rows * columns - count, *scaled.shape[1:]), np.float32)
        tiles = np.concatenate([scaled, blank]).reshape(rows, columns, *scaled.shape[1:])
        _tiles(axes, tiles if channels == 3 else tiles[..., 0], cmap="gray", vmin=0, vmax=1)
        axes.set_axis_off()
    else:
        _tiles(axes, scaled.transpose(0, 3, 1, 2), cmap="gray", vmin=0, vmax=1)
        _number(axes, rows, columns, "component" if "component" in kind else "filter", "band", first=1)
    axes.set_anchor("NW")
    return figure


@styled
def mixing(layers: Mapping[int, Array], units: int) -> Figure:
    """Hidden units of a Mixer's token-mixing MLPs, (count, h, w), by the numbers of their layers; eight in a row."""
    count, h, w = next(iter(layers.values())).shape
    across, down = 8, -(-count // 8)
    wide, head, foot, apart = 2.3, 0.6, 0.3, 0.2  # inches; `wide` is a layer
    tall = wide * down * h / (across * w)
    width, height = max(len(layers) * (wide + apart) - apart, _LEAST), head + tall + foot
    figure = Figure(figsize=(width, height))
    figure.text(0, 1 - 0.1 / height, "Token mixing", fontsize=11, fontweight="bold", va="center")
    which = f"all {units} hidden units" if count == units else f"the {count} strongest of {units} hidden units"
    note = f"what {which} take of each patch; opposites in pairs, from low to high frequency"
    figure.text(0, 1 - 0.35 / height, note, color=GREY, va="center")
    blank = np.full((across * down - count, h, w), np.nan, np.float32)
    for i, (number, maps) in enumerate(layers.items()):
        axes = figure.add_axes((i * (wide + apart) / width, foot / height, wide / width, tall / height))
        scaled = maps / np.maximum(np.abs(maps).max(axis=(1, 2), keepdims=True), 1e-12)
        _tiles(axes, np.concatenate([scaled, blank]).reshape(down, across, h, w), cmap=SIGNED, vmin=-1, vmax=1)
        axes.set(xticks=[], yticks=[], xlabel=f"layer {number}")
    return figure


def _spacing(h: int, w: int) -> tuple[int, int, int]:
    """Pixels of a tile and of the gap between tiles: every value is enlarged alike, so that thin gaps can be drawn."""
    times = -(-_TILE // max(h, w))
    return h * times, w * times, max(max(h, w) * times // 16, 1)


def _tiles(axes: Axes, tiles: Array, **colours: Any) -> AxesImage:
    """Draws tiles (R, C, h, w) or, in colour, (R, C, h, w, 3), with white gaps between them."""
    rows, columns, h, w = tiles.shape[:4]
    tall, wide, gap = _spacing(h, w)
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


def _number(
    axes: Axes,
    rows: int,
    columns: int,
    row: str,
    column: str,
    first: int = 0,
    names: tuple[NDArray[Any], NDArray[Any]] | None = None,
) -> None:
    """Numbers the rows and columns of tiles."""
    bottom, right = axes.get_ylim()[0], axes.get_xlim()[1]
    down, across = names or (np.arange(rows) + first, np.arange(columns) + first)
    axes.set_yticks((np.arange(rows) + 0.5) * bottom / rows, down, fontsize=7.5)
    axes.set_xticks((np.arange(columns) + 0.5) * right / columns, across, fontsize=7.5)
    axes.set_ylabel(row)
    axes.set_xlabel(column)


def _mark(axes: Axes, corner: tuple[float, float], tall: float, wide: float, line: float) -> None:
    """Frames a patch of a picture or tile whose upper left corner is at (y, x)."""
    y, x = corner
    axes.add_patch(Rectangle((x, y), wide, tall, fill=False, edgecolor=MARK, linewidth=line, clip_on=False))


def _bar(figure: Figure, axes: Axes, image: AxesImage, label: str) -> None:
    bar = figure.colorbar(image, ax=axes, shrink=0.8, aspect=28, pad=0.02)
    bar.outline.set_visible(False)  # type: ignore[operator]  # matplotlib calls it a Spine
    bar.ax.tick_params(labelsize=8)
    bar.set_label(label, fontsize=8)
