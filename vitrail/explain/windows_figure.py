"""The figure of a Swin's windows: the grid that they cut a picture into, and what the middle of each one looks at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vitrail.evaluate.figures import GREY, short, styled
from vitrail.explain.figures import HEAT, MARK, Array, View, enlarge
from vitrail.explain.windows import Windows


@styled
def windows(
    views: Sequence[View], maps: Mapping[int, Array], layouts: Sequence[Windows], captions: Sequence[str]
) -> Figure:
    """Pictures beside maps (B, h, w) of layers, by their numbers: each window by itself from none to its most."""
    aspect = views[0].shape[0] / views[0].shape[1]
    wide, head, names, caption, apart = 1.9, 0.6, 0.2, 0.22, 0.1  # inches
    tall = wide * aspect
    width = (1 + len(maps)) * (wide + apart) - apart
    height = head + names + len(views) * (caption + tall + apart) - apart
    figure = Figure(figsize=(width, height))
    figure.text(0, 1 - 0.1 / height, "Attention within windows", fontsize=11, fontweight="bold", va="center")
    note = "from the patch in the middle of each window (dot), from none (dark) to the window's most (light)"
    figure.text(0, 1 - 0.35 / height, note, color=GREY, va="center")
    for row, view in enumerate(views):
        top = head + names + row * (caption + tall + apart) + caption
        for column, layer in enumerate([None, *maps]):
            place = (column * (wide + apart) / width, 1 - (top + tall) / height, wide / width, tall / height)
            axes = figure.add_axes(place)
            axes.set_axis_off()
            h, w = view.shape[:2]
            if layer is None:
                axes.imshow(enlarge(view), extent=(0, w, h, 0), aspect="auto", interpolation="antialiased")
                axes.set_title(short(captions[row], 24), fontsize=8.5, weight="normal", pad=3)
                continue
            layout = layouts[layer]
            axes.imshow(
                _lit(view, maps[layer][row], layout), extent=(0, w, h, 0), aspect="auto", interpolation="nearest"
            )
            down, across = layout.edges()
            axes.hlines([y * layout.pixels for y in down[1:-1]], 0, w, color=MARK, linewidth=1)
            axes.vlines([x * layout.pixels for x in across[1:-1]], 0, h, color=MARK, linewidth=1)
            y, x = np.divmod(layout.middles().numpy(), layout.grid[1])
            axes.scatter((x + 0.5) * layout.pixels, (y + 0.5) * layout.pixels, s=5, color=MARK, linewidths=0)
            axes.set(xlim=(0, w), ylim=(h, 0))
            if row == 0:
                grid = f"{layout.grid[0]}×{layout.grid[1]}"
                shifted = ", shifted" if any(layout.shift) else ""
                axes.set_title(f"layer {layer + 1}: {grid}{shifted}", fontsize=8.5, weight="normal", pad=3, color=GREY)
    return figure


def _lit(view: View, weights: Array, layout: Windows) -> NDArray[np.floating]:
    """A map over a picture, (h, w, 3): every window from its least to its most, with a hint of the picture."""
    scaled = np.zeros_like(weights)
    down, across = layout.edges()
    for top, bottom in pairwise(down):
        for left, right in pairwise(across):
            window = weights[top:bottom, left:right]
            scaled[top:bottom, left:right] = window / max(window.max(), 1e-12)
    y, x = (np.arange(side) // layout.pixels for side in view.shape[:2])
    colours = colormaps[HEAT](scaled)[:, :, :3][y][:, x]
    return 0.8 * colours + 0.2 * view / 255
