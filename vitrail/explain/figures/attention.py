"""Figures of attention: rollout, heads, attention distance."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray
from torch import Tensor

from vitrail.charts import build
from vitrail.charts.draw import draw
from vitrail.charts.style import GREY, INK, ORANGE, heading, short, styled
from vitrail.explain.attention import attention_distance, attention_maps, even_distance, patch_attention, rollout
from vitrail.explain.figures.tiles import HEAT, MARK, Array, View, draw_tiles, enlarge, number_tiles, spacing
from vitrail.explain.geometry import geometries, window_geometries
from vitrail.explain.subject import Drawing, Subject
from vitrail.models import Model

PAGE = 24  # pictures per figure

_LAYERS, _HEADS = 24, 16  # drawn at most
_ACROSS = 3  # pictures per row, each with its map and overlay


def rollouts(subject: Subject) -> Iterator[Drawing]:
    """Attention rollout of the pictures."""
    maps = np.concatenate([rollout(subject.attentive, images) for images in subject.batches()])
    for at in range(0, len(maps), PAGE):
        page = subject.pictures[at : at + PAGE]
        name = "rollout" if at == 0 else f"rollout-{1 + at // PAGE}"
        arrays = {"rollout": maps[at : at + PAGE], "files": np.array([picture.name for picture in page])}
        views, captions = [picture.view for picture in page], [picture.caption for picture in page]
        drawn = draw_rollouts(views, maps[at : at + PAGE], captions, [picture.wrong for picture in page])
        yield Drawing(name, drawn, arrays)


def heads(subject: Subject) -> Iterator[Drawing]:
    """Attention of every head of every layer, one figure per picture."""
    yield from _maps(subject, "heads", partial(attention_maps, subject.attentive), _query(subject.attentive))


def _query(model: Model) -> str:
    """The query of the attention maps, in words."""
    layers = geometries(model)
    if layers[0].grid != layers[-1].grid:
        last = ", in the last stage from the class token" if layers[-1].prefix else ""
        return f"from all patches on average{last}"
    counts = layers[-1].start > 0  # tokens that the head reads
    tokens, patches = int(counts[: layers[-1].prefix].sum()), bool(counts[layers[-1].prefix :].any())
    if not tokens:
        return "from all patches on average"
    named = "from the class token" if tokens == 1 else "from the class and distillation tokens"
    return f"{named} and all patches" if patches else named


def patches(subject: Subject) -> Iterator[Drawing]:
    """Attention of every head from the chosen patch, one figure per picture."""
    if subject.patch is not None:
        row, column = subject.patch
        attend = partial(patch_attention, subject.attentive, row=row, column=column)
        yield from _maps(subject, "patch", attend, f"from patch {row},{column}", subject.patch)


def _maps(
    subject: Subject,
    kind: str,
    attend: Callable[[Tensor], list[Array]],
    query: str,
    patch: tuple[int, int] | None = None,
) -> Iterator[Drawing]:
    subject = subject.fewer(1) if subject.left_out else subject
    # for each picture, one (H, h, w) per layer
    maps = (of_picture for images in subject.batches() for of_picture in zip(*attend(images), strict=True))
    digits = len(str(len(subject.pictures)))
    for number, (picture, weights) in enumerate(zip(subject.pictures, maps, strict=True), start=1):
        drawn = draw_heads(picture.view, weights, picture.caption, query, patch)
        arrays = {f"layer{layer}": of_layer for layer, of_layer in enumerate(weights, start=1)}
        yield Drawing(f"{kind}-{number:0{digits}}-{_plain(picture.name)}", drawn, arrays)


def _plain(name: str) -> str:
    """The name of a picture as part of a file name."""
    return re.sub(r"[^\w-]+", "-", Path(name).stem)[:40] or "picture"


def distance(subject: Subject) -> Iterator[Drawing]:
    """Mean attention distance of every head."""
    model = subject.attentive
    far, even = attention_distance(model, subject.sample()), even_distance(model)
    uniform = f"uniform attention{' within each window' if window_geometries(model) else ''}"
    drawn = draw(build.distance(far, even, model.config.img_size[1], subject.sampled, uniform))
    yield Drawing("distance", drawn, {"distance": far, "even": even, "images": np.array(subject.sampled)})


# As figures ----------------------------------------------------------------------------------------------


def brightest(weights: Array) -> float:
    """The value of a map that is drawn brightest: the maximum, but at most twice the 98 % quantile.

    Self-supervised models such as DINO send most of their attention through single patches of the background
    (https://arxiv.org/abs/2309.16588). Scaled to the maximum, all other patches would be black.
    """
    most = float(weights.max())
    return min(most, 2 * float(np.quantile(weights, 0.98))) or most


def overlay(view: View, weights: Array) -> View:
    """A picture darkened where a smoothed map (h, w) is low, as in figure 6 of the ViT paper."""
    picture = enlarge(view)
    smooth = F.interpolate(torch.from_numpy(weights)[None, None], picture.shape[:2], mode="bicubic")[0, 0]
    light = (smooth / brightest(weights)).clamp(0, 1).numpy()[:, :, None]
    return (picture * (0.08 + 0.92 * light)).astype(np.uint8)


def heat(weights: Array, size: tuple[int, ...]) -> View:
    """A map (h, w) as a heat map of the given size, without interpolation."""
    h, w = weights.shape
    y, x = np.arange(size[0]) * h // size[0], np.arange(size[1]) * w // size[1]
    colours = colormaps[HEAT](weights / brightest(weights), bytes=True)[:, :, :3]
    return colours[y][:, x]


@styled
def draw_rollouts(views: Sequence[View], maps: Array, captions: Sequence[str], wrong: Sequence[bool] = ()) -> Figure:
    """Pictures with their maps (B, h, w): picture, map and overlay side by side."""
    across = min(_ACROSS, len(views))
    down = -(-len(views) // across)
    h, w = enlarge(views[0]).shape[:2]
    gap = w // 20
    wide, head, caption, apart = 4.0, 0.6, 0.22, 0.14  # inches; picture, map and overlay are one image
    tall = wide * h / (3 * w + 2 * gap)
    width, height = across * (wide + apart) - apart, head + down * (caption + tall + apart) - apart
    figure = Figure(figsize=(width, height))
    figure.text(0, 1 - 0.1 / height, "Attention rollout", fontsize=11, fontweight="bold", va="center")
    clipped = any(brightest(weights) < weights.max() for weights in maps)
    most = "the maximum, at most twice the 98 % quantile" if clipped else "the maximum"
    note = f"from 0 (dark) to {most} (light); uniform attention has a peak of 1×"
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
def draw_heads(
    view: View,
    maps: Sequence[Array],
    caption: str,
    query: str = "from the class token",
    patch: tuple[int, int] | None = None,
) -> Figure:
    """Attention maps of a picture, one (H, h, w) per layer, with the query patch marked.

    Later layers may have coarser grids and more heads: their patches cover all patches merged into them.
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
    heading(right, f"Attention {query}", _left_out(maps, len(layers), count))
    draw_tiles(right, tiles, cmap=HEAT, vmin=0, vmax=1)
    number_tiles(right, len(layers), count, "layer", "head", names=(_named(maps, layers), np.arange(count) + 1))
    right.set_anchor("NW")
    if patch is not None:
        _mark(left, patch, 1, 1, 2.0)
        tall, wide, gap = spacing(h, w)
        for row, layer in enumerate(layers):
            times = _times(maps[layer].shape[1:], (h, w))
            y, x = (place // n * n for place, n in zip(patch, times, strict=True))
            covered = min(times[0], h - y), min(times[1], w - x)  # the last patch of a side may be cut
            for column in range(min(len(maps[layer]), count)):
                corner = row * (tall + gap) + y * tall / h, column * (wide + gap) + x * wide / w
                _mark(right, corner, covered[0] * tall / h, covered[1] * wide / w, 0.8)
    return figure


def _left_out(maps: Sequence[Array], layers: int, count: int) -> str:
    """The meaning of the colours, and how many layers and heads are drawn if not all."""
    most = max(len(of_layer) for of_layer in maps)
    some = [f"{layers} of {len(maps)} layers"] if layers < len(maps) else []
    some += [f"{count} of up to {most} heads"] if count < most else []
    return "each head scaled separately, from 0 (dark) to its maximum (light)" + "".join(f"; {words}" for words in some)


def _named(maps: Sequence[Array], layers: NDArray[Any]) -> NDArray[Any]:
    """Layer numbers, with grids if these differ."""
    grids = [of_layer.shape[1:] for of_layer in maps]
    return np.array([f"{i + 1}" if len(set(grids)) == 1 else "{}×{}   {}".format(*grids[i], i + 1) for i in layers])


def _times(coarse: tuple[int, ...], fine: tuple[int, ...]) -> tuple[int, int]:
    """Patches of the first stage per side of a later patch: stages halve the grid, rounding up."""
    down, across = (2 ** math.ceil(math.log2(n / m)) for m, n in zip(coarse, fine, strict=True))
    return down, across


def _refined(maps: Array, grid: tuple[int, int]) -> Array:
    """Maps (..., h, w) of any stage, repeated to the grid of the first."""
    down, across = _times(maps.shape[-2:], grid)
    return maps.repeat(down, axis=-2).repeat(across, axis=-1)[..., : grid[0], : grid[1]]


def _mark(axes: Axes, corner: tuple[float, float], tall: float, wide: float, line: float) -> None:
    """Draws a frame around a patch with its upper left corner at (y, x)."""
    y, x = corner
    axes.add_patch(Rectangle((x, y), wide, tall, fill=False, edgecolor=MARK, linewidth=line, clip_on=False))
