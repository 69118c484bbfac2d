"""Figure of window attention: the windows of a Swin, and the attention of the centre of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vitrail.charts.style import GREY, INK, short, styled
from vitrail.explain.attention import window_attention
from vitrail.explain.figures.tiles import HEAT, MARK, Array, View, enlarge
from vitrail.explain.geometry import window_geometries
from vitrail.explain.subject import Drawing, Subject
from vitrail.explain.windows import Windows

ROWS = 8  # pictures in the figure


def windows(subject: Subject) -> Iterator[Drawing]:
    """Regular and shifted windows of every stage, with the attention of their central patches."""
    if not any(layer.window for layer in subject.model.attentions()):
        return
    shown = subject.fewer(ROWS)
    geometries = window_geometries(subject.model)
    batches = [window_attention(subject.model, images) for images in shown.batches()]
    kinds = {(geometry.grid, geometry.shift): number for number, geometry in reversed(list(enumerate(geometries)))}
    maps = {number: np.concatenate([batch[number] for batch in batches]) for number in sorted(kinds.values())}
    views, captions = [picture.view for picture in shown.pictures], [picture.caption for picture in shown.pictures]
    drawn = draw_windows(views, maps, geometries, captions)
    yield Drawing("windows", drawn, {f"layer{number + 1}": of_layer for number, of_layer in maps.items()})


@styled
def draw_windows(
    views: Sequence[View], maps: Mapping[int, Array], geometries: Sequence[Windows], captions: Sequence[str]
) -> Figure:
    """One row per picture: the picture and its maps, (B, h, w) by layer index."""
    h, w = views[0].shape[:2]
    wide, head, caption, apart = 1.9, 0.6, 0.22, 0.1  # inches
    tall = wide * h / w
    width, height = (1 + len(maps)) * (wide + apart) - apart, head + len(views) * (caption + tall + apart) - apart
    figure = Figure(figsize=(width, height))
    figure.text(0, 1 - 0.1 / height, "Attention within windows", fontsize=11, fontweight="bold", va="center")
    note = "from the central patch of each window (dot), from 0 (dark) to the maximum of the window (light)"
    figure.text(0, 1 - 0.35 / height, note, color=GREY, va="center")

    def pane(row: int, column: int, title: str, colour: str) -> Axes:
        top = head + row * (caption + tall + apart) + caption
        place = (column * (wide + apart) / width, 1 - (top + tall) / height, wide / width, tall / height)
        axes = figure.add_axes(place, xlim=(0, w), ylim=(h, 0), autoscale_on=False)
        axes.set_axis_off()
        axes.set_title(title, fontsize=8.5, weight="normal", pad=3, color=colour)
        return axes

    for row, view in enumerate(views):
        axes = pane(row, 0, short(captions[row], 24), INK)
        axes.imshow(enlarge(view), extent=(0, w, h, 0), aspect="auto", interpolation="antialiased")
        for column, (layer, of_layer) in enumerate(maps.items(), start=1):
            geometry = geometries[layer]
            title = "layer {}: {}×{}".format(layer + 1, *geometry.grid) + (", shifted" if any(geometry.shift) else "")
            _draw(pane(row, column, title if row == 0 else "", GREY), of_layer[row], geometry, (h, w))
    return figure


def _draw(axes: Axes, weights: Array, geometry: Windows, size: tuple[int, int]) -> None:
    """Draws a map scaled per window, with the borders and centres of windows."""
    down, across = geometry.edges()
    scaled = weights.copy()
    for top, bottom in pairwise(down):
        for left, right in pairwise(across):
            window = scaled[top:bottom, left:right]
            window /= max(window.max(), 1e-12)
    h, w = size
    y, x = np.arange(h) // geometry.pixels, np.arange(w) // geometry.pixels
    colours = colormaps[HEAT](scaled, bytes=True)[:, :, :3][y][:, x]
    axes.imshow(colours, extent=(0, w, h, 0), aspect="auto", interpolation="nearest")
    axes.hlines([row * geometry.pixels for row in down[1:-1]], 0, w, color=MARK, linewidth=1)
    axes.vlines([column * geometry.pixels for column in across[1:-1]], 0, h, color=MARK, linewidth=1)
    rows, columns = np.divmod(geometry.middles().numpy(), geometry.grid[1])
    places = (columns + 0.5) * geometry.pixels, (rows + 0.5) * geometry.pixels
    axes.scatter(*places, s=9, color=MARK, edgecolors=INK, linewidths=0.4)
