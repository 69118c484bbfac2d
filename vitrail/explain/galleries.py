"""Pictures side by side with a few words under each: the most wrong predictions, and the least certain ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image
from scipy.special import expit, softmax

from vitrail.charts.figures import GREY, INK, ORANGE, STYLE, short
from vitrail.data import Split
from vitrail.data.audit.contact_sheet import wrap
from vitrail.data.pixels import to_pil
from vitrail.errors import UserError
from vitrail.evaluate.metrics import each_image
from vitrail.weights import Card

Numbers = NDArray[np.int64]
Line = tuple[str, str, int]  # text, colour, and how many lines it may take

_CELL, _GAP = 1.25, 0.15  # inches; the width of a cell is the one that `wrap` fills
_HEAD, _LINE, _SMALL = 0.75, 0.115, 6.5
_FEW = 64  # pixels below which each one is shown as a square


@dataclass(frozen=True)
class Tile:
    """A picture, what stands under it, and the colour of its frame if it has one."""

    image: Image.Image
    lines: Sequence[Line]
    frame: str | None = None


def thumbnail(split: Split, i: int, side: int = 256) -> Image.Image:
    """Image `i` of a split for a person to look at, no larger than it needs to be."""
    image = to_pil(split.image(i))
    image.thumbnail((side, side))
    return image


def sheet(rows: Sequence[Sequence[Tile]], title: str, note: str) -> Figure:
    """Rows of pictures on one page."""
    with mpl.rc_context(STYLE):
        return _sheet([[(tile, _wrapped(tile)) for tile in row] for row in rows], title, note)


def _wrapped(tile: Tile) -> list[tuple[str, str]]:
    """The lines under a picture, each no wider than it, and their colours."""
    return [
        (line, colour)
        for text, colour, most in tile.lines
        for line in wrap(short(" ".join(text.split()), 30 * most), most)
    ]


def _sheet(rows: Sequence[Sequence[tuple[Tile, list[tuple[str, str]]]]], title: str, note: str) -> Figure:
    below = [max(len(lines) for _, lines in row) * _LINE + 0.2 for row in rows]
    width = max(map(len, rows)) * (_CELL + _GAP) + _GAP
    height = _HEAD + len(rows) * _CELL + sum(below)
    figure = Figure(figsize=(width, height))
    figure.text(_GAP / width, 1 - 0.3 / height, title, fontsize=12, weight="bold")
    figure.text(_GAP / width, 1 - 0.52 / height, note, color=GREY)
    top = height - _HEAD
    for row, room in zip(rows, below, strict=True):
        for column, (tile, lines) in enumerate(row):
            x = (_GAP + column * (_CELL + _GAP)) / width
            _draw(figure, (x, (top - _CELL) / height, _CELL / width, _CELL / height), tile)
            for number, (line, colour) in enumerate(lines):
                y = (top - _CELL - 0.05 - number * _LINE) / height
                figure.text(x, y, line, va="top", fontsize=_SMALL, color=colour)
        top -= _CELL + room
    return figure


def _draw(figure: Figure, box: tuple[float, float, float, float], tile: Tile) -> None:
    axes = figure.add_axes(box)
    axes.set(xticks=[], yticks=[])
    axes.grid(False)
    axes.spines[:].set_visible(tile.frame is not None)
    axes.spines[:].set(color=tile.frame, linewidth=2)
    few = max(tile.image.size) < _FEW
    axes.imshow(tile.image, cmap="gray", vmin=0, vmax=255, interpolation="nearest" if few else "antialiased")
    axes.set_anchor("C")


# Which predictions ----------------------------------------------------------------------------------------


def losses(card: Card, outputs: NDArray[np.floating], targets: NDArray[Any]) -> NDArray[np.float64]:
    """How wrong each prediction is, (N,): cross-entropy, that of all labels, or the root mean square of the errors.

    Errors of a regression are in standard deviations of the training set, so that columns of different units compare.
    """
    outputs = outputs.astype(np.float64)
    if card.task == "multilabel":
        return (np.logaddexp(0, outputs) - targets * outputs).sum(axis=1)
    if card.task == "regression":
        true = (targets - np.asarray(card.target_mean)) / np.asarray(card.target_std)
        return np.sqrt(((outputs - true) ** 2).mean(axis=1))
    return each_image(outputs, targets)[1]


def margins(card: Card, outputs: NDArray[np.floating]) -> NDArray[np.float64]:
    """How certain each prediction is, (N,): by how much the likeliest class leads the next.

    Of several labels, the distance of the least certain one from its threshold. A regression does not tell.
    """
    if card.task == "regression":
        raise UserError("A regression gives numbers without saying how certain they are.")
    chances = probabilities(card, outputs)
    if card.task == "multilabel":
        return np.abs(chances - np.asarray(card.thresholds)).min(axis=1)
    if chances.shape[1] == 1:
        return np.ones(len(chances))
    second, first = np.partition(chances, -2, axis=1)[:, -2:].T
    return first - second


def probabilities(card: Card, outputs: NDArray[np.floating]) -> NDArray[np.float64]:
    """The probabilities of classes, or of labels, (N, K)."""
    outputs = outputs.astype(np.float64)
    return expit(outputs) if card.task == "multilabel" else softmax(outputs, axis=1)


def most_wrong(card: Card, outputs: NDArray[np.floating], targets: NDArray[Any], count: int = 24) -> Numbers:
    """The numbers of the images whose answers are wrong, those with the highest loss first."""
    order = np.argsort(-losses(card, outputs, targets), kind="stable")
    if card.task == "multiclass":
        order = order[outputs.argmax(axis=1)[order] != targets[order]]
    elif card.task == "multilabel":
        given = probabilities(card, outputs) >= np.asarray(card.thresholds)
        order = order[(given != (targets > 0.5)).any(axis=1)[order]]
    return order[:count]


def least_certain(card: Card, outputs: NDArray[np.floating], count: int = 24) -> Numbers:
    """The numbers of the images with the smallest margin, the smallest first."""
    return np.argsort(margins(card, outputs), kind="stable")[:count]


# As pictures ----------------------------------------------------------------------------------------------


def gallery(
    card: Card,
    split: Split,
    outputs: NDArray[np.floating],
    targets: NDArray[Any],
    chosen: Numbers,
    title: str,
    note: str,
    across: int = 8,
) -> Figure:
    """The images of these numbers, with what is true and what was said of them."""
    say = captions(card, outputs, targets)
    tiles = [Tile(thumbnail(split, int(i)), say(int(i))) for i in chosen]
    return sheet([tiles[at : at + across] for at in range(0, len(tiles), across)], title, note)


def captions(card: Card, outputs: NDArray[np.floating], targets: NDArray[Any]) -> Callable[[int], list[Line]]:
    """What to write under an image: what is true, and what was said in orange as far as it is wrong."""
    if card.task == "regression":
        return lambda i: _values(card, outputs[i], targets[i])
    chances = probabilities(card, outputs)
    if card.task == "multilabel":
        return lambda i: _labels(card, chances[i], targets[i])
    return lambda i: _classes(card, chances[i], int(targets[i]))


def _classes(card: Card, chances: NDArray[np.float64], target: int) -> list[Line]:
    def name(k: int) -> str:
        return f"{card.classes[k]} {chances[k]:.1%}"

    first, *others = np.argsort(-chances, kind="stable").tolist()
    if first != target:
        return [(f"true: {name(target)}", INK, 2), (f"said: {name(first)}", ORANGE, 2)]
    return [(f"right: {name(target)}", INK, 2), *((f"next: {name(k)}", GREY, 2) for k in others[:1])]


def _labels(card: Card, chances: NDArray[np.float64], target: NDArray[Any]) -> list[Line]:
    true, given = target > 0.5, chances >= np.asarray(card.thresholds)

    def names(which: NDArray[np.bool_]) -> str:
        order = sorted(np.flatnonzero(which), key=lambda k: -abs(chances[k] - true[k]))
        return ", ".join(f"{card.classes[k]} {chances[k]:.0%}" for k in order)

    lines = [(f"right: {names(true & given)}", INK, 2)] if (true & given).any() else []
    lines += [(f"missed: {names(true & ~given)}", ORANGE, 2)] if (true & ~given).any() else []
    lines += [(f"wrongly: {names(given & ~true)}", ORANGE, 2)] if (given & ~true).any() else []
    return lines or [("right: (no label)", INK, 1)]


def _values(card: Card, output: NDArray[np.floating], target: NDArray[Any]) -> list[Line]:
    """The number that is farthest off, in its units."""
    std, mean = np.asarray(card.target_std), np.asarray(card.target_mean)
    said = output * std + mean
    worst = int(np.argmax(np.abs(said - target) / std))
    name = f"{card.classes[worst]} " if len(card.classes) > 1 else ""
    return [(f"true: {name}{target[worst]:.4g}", INK, 2), (f"said: {name}{said[worst]:.4g}", ORANGE, 2)]
