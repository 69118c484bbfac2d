"""Draws the README's figure from a run on photographs: `python docs/readme.py runs/PHOTOS-vit_nano8`.

It shows scikit-learn's two freely licensed sample photographs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from sklearn.datasets import load_sample_images

from vitrail.charts.style import INK, STYLE, save
from vitrail.explain import position_similarity, rollout
from vitrail.explain.figures.tiles import HEAT, SIMILARITY
from vitrail.weights import open_run

Picture = NDArray[np.uint8]  # h w 3
_LEAD = 0.08  # width of the lead between two panes, as a fraction of a pane
_COLOUR = (34, 37, 43)


def window(picture: Picture, grid: tuple[int, int]) -> Picture:
    """An image as a stained-glass window: patches as panes, with lead between them."""
    side = 24  # pixels of a pane
    h, w = grid[0] * side, grid[1] * side
    large = picture[np.arange(h) * picture.shape[0] // h][:, np.arange(w) * picture.shape[1] // w]
    lead = max(round(_LEAD * side), 1)
    rows, columns = np.arange(h) % side < lead, np.arange(w) % side < lead
    large[rows], large[:, columns] = _COLOUR, _COLOUR
    return large


def show(axes: Axes, picture: Picture, title: str) -> None:
    axes.imshow(picture, interpolation="nearest")
    axes.set_axis_off()
    axes.set_title(title, fontsize=11, fontweight="normal", loc="left", color=INK, pad=6)


def draw(run: Path) -> Figure:
    """Two photographs as patches, their attention rollout, and the similarity of position embeddings."""
    model, card = open_run(run)
    grid = model.config.grid
    photographs = load_sample_images().images
    pixels = np.stack([card.preprocess.pixels(photograph) for photograph in photographs])
    images = card.preprocess.normalise(torch.from_numpy(pixels))
    with torch.inference_mode():
        shares = model(images).softmax(dim=1).numpy()
    figure = Figure(figsize=(12.5, 2.85), layout="constrained")
    axes = figure.subplots(1, 5)
    titles = [f"{card.classes[share.argmax()]}, {share.max():.0%} sure" for share in shares]
    for i, attention in enumerate(rollout(model, images)):
        heat = colormaps[HEAT](attention / attention.max(), bytes=True)[:, :, :3]
        show(axes[2 * i], window(pixels[i].transpose(1, 2, 0), grid), titles[i])
        show(axes[2 * i + 1], window(heat, grid), "where it looks")
    alike = position_similarity(model)
    low, high = alike.min(), np.partition(alike.ravel(), -grid[0] * grid[1] - 1)[-grid[0] * grid[1] - 1]
    tiles = colormaps[SIMILARITY]((alike - low) / (high - low), bytes=True)[..., :3]
    show(
        axes[4],
        window(tiles.transpose(0, 2, 1, 3, 4).reshape(grid[0] ** 2, grid[1] ** 2, 3), grid),
        "which places are alike",
    )
    return figure


if __name__ == "__main__":
    with mpl.rc_context(STYLE):
        save(draw(Path(sys.argv[1])), Path(__file__).parent / "images" / "readme.png")
