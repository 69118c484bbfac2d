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

from vitrail.data import Split
from vitrail.data.pixels import picture
from vitrail.errors import UserError
from vitrail.evaluate.figures import GREY, INK, ORANGE, STYLE
from vitrail.evaluate.sheet import wrap
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
    image = picture(split.image(i))
    image.thumbnail((side, side))
    return image


def sheet(rows: Sequence[Sequence[Tile]], title: str, note: str) -> Figure:
    """Rows of pictures on one page."""
    below = max(sum(lines for _, _, lines in tile.lines) for row in rows for tile in row) * _LINE + 0.14
    width = max(map(len, rows)) * (_CELL + _GAP) + _GAP
    height = _HEAD + len(rows) * (_CELL + below)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width, height))
        figure.text(_GAP / width, 1 - 0.3 / height, title, fontsize=12, weight="bold")
        figure.text(_GAP / width, 1 - 0.52 / height, note, color=GREY)
        for r, row in enumerate(rows):
            for c, tile in enumerate(row):
                x, y = _GAP + c * (_CELL + _GAP), height - _HEAD - r * (_CELL + below)
                _draw(figure, (x / width, (y - _CELL) / height, _CELL / width, _CELL / height), tile)
                y -= _CELL + 0.05
                for text, colour, most in tile.lines:
                    for line in wrap(text, most):
                        figure.text(x / width, y / height, line, va="top", fontsize=_SMALL, color=colour)
                        y -= _LINE
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
    highest = outputs.max(axis=1, keepdims=True)
    logs = np.log(np.exp(outputs - highest).sum(axis=1)) + highest[:, 0]
    return logs - outputs[np.arange(len(targets)), targets]


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
    if card.task == "multilabel":
        return 1 / (1 + np.exp(-np.clip(outputs, -500, 500)))
    chances = np.exp(outputs - outputs.max(axis=1, keepdims=True))
    return chances / chances.sum(axis=1, keepdims=True)


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


def most_wrong_figure(
    card: Card, split: Split, outputs: NDArray[np.floating], targets: NDArray[Any], name: str = "", count: int = 24
) -> Figure:
    """The most wrong predictions of a split, with what is true and what was said; `name` tells the data."""
    chosen = most_wrong(card, outputs, targets, count)
    if not len(chosen):
        raise UserError(f"No prediction of {len(targets):,} is wrong, so there is no gallery of them.")
    order = "largest error first" if card.task == "regression" else "highest loss first"
    return _gallery(card, split, outputs, targets, chosen, "Most wrong", _note(order, len(targets), name))


def least_certain_figure(
    card: Card, split: Split, outputs: NDArray[np.floating], targets: NDArray[Any], name: str = "", count: int = 24
) -> Figure:
    """The least certain predictions of a split; `name` tells the data."""
    chosen = least_certain(card, outputs, count)
    how = "nearest to a threshold" if card.task == "multilabel" else "smallest lead of the first class over the second"
    return _gallery(card, split, outputs, targets, chosen, "Least certain", _note(how, len(targets), name))


def _note(order: str, images: int, name: str) -> str:
    return f"{order}, of {images:,} images{f' of {name}' if name else ''}"


def _gallery(
    card: Card,
    split: Split,
    outputs: NDArray[np.floating],
    targets: NDArray[Any],
    chosen: Numbers,
    title: str,
    note: str,
    across: int = 8,
) -> Figure:
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
    first, second = (int(k) for k in np.argsort(-chances, kind="stable")[:2]) if len(chances) > 1 else (0, 0)
    lines = [(f"true: {card.classes[target]} {chances[target]:.1%}", INK, 2)]
    colour = INK if first == target else ORANGE
    lines.append((f"said: {card.classes[first]} {chances[first]:.1%}", colour, 2))
    if first == target:
        lines.append((f"next: {card.classes[second]} {chances[second]:.1%}", GREY, 2))
    return lines


def _labels(card: Card, chances: NDArray[np.float64], target: NDArray[Any]) -> list[Line]:
    true, given = target > 0.5, chances >= np.asarray(card.thresholds)

    def names(which: NDArray[np.bool_]) -> str:
        order = sorted(np.flatnonzero(which), key=lambda k: -abs(chances[k] - true[k]))
        return ", ".join(f"{card.classes[k]} {chances[k]:.0%}" for k in order)

    lines = [(f"right: {names(true & given)}", INK, 2)] if (true & given).any() else []
    lines += [(f"missed: {names(true & ~given)}", ORANGE, 2)] if (true & ~given).any() else []
    return lines + ([(f"wrongly: {names(given & ~true)}", ORANGE, 2)] if (given & ~true).any() else [])


def _values(card: Card, output: NDArray[np.floating], target: NDArray[Any]) -> list[Line]:
    """The number that is farthest off, in its units."""
    std, mean = np.asarray(card.target_std), np.asarray(card.target_mean)
    said = output * std + mean
    worst = int(np.argmax(np.abs(said - target) / std))
    name = f"{card.classes[worst]} " if len(card.classes) > 1 else ""
    return [(f"true: {name}{target[worst]:.4g}", INK, 2), (f"said: {name}{said[worst]:.4g}", ORANGE, 2)]
