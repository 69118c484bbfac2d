"""Galleries of images with their predictions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vitrail.charts.style import GREY, INK, ORANGE
from vitrail.charts.tiles import Caption, Section, Tile, sheet
from vitrail.data import Split
from vitrail.data.pixels import Pixels, thumbnail, to_pil
from vitrail.tasks import Task

_COLOURS = {"plain": INK, "wrong": ORANGE, "muted": GREY}
_ACROSS = 8  # images in a row


def tiles(
    task: Task, split: Split, outputs: NDArray[np.floating], targets: NDArray[Any], chosen: Sequence[int]
) -> list[Tile]:
    """The chosen images, captioned with prediction and truth."""
    return [
        Tile(
            thumbnail(_whole(task, split.image(i), outputs[i], targets[i])),
            [Caption(text, _COLOURS[tone], lines) for text, tone, lines in task.caption(meant, targets[i])],
        )
        for i, meant in zip(chosen, task.means(outputs[chosen]), strict=True)
    ]


def _whole(task: Task, image: Pixels, outputs: NDArray[np.floating], target: Any) -> Pixels:
    """An image, with the answer over it if that has a place."""
    layers = task.layers(outputs, target)
    if layers is None:
        return image
    picture = to_pil(image).convert("RGBA")
    picture.alpha_composite(layers[0])
    return np.asarray(picture.convert("RGB"))


def gallery(shown: Sequence[Tile], title: str, note: str) -> Figure:
    """Tiles on one sheet."""
    return sheet(Section(title, note, [shown[at : at + _ACROSS] for at in range(0, len(shown), _ACROSS)]))
