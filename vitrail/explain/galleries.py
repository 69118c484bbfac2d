"""Pictures side by side with a few words under each: the most wrong predictions, and the least certain ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.special import expit, softmax

from vitrail.charts.style import GREY, ORANGE
from vitrail.charts.tiles import Caption, Section, Tile, sheet
from vitrail.data import Split
from vitrail.data.pixels import thumbnail
from vitrail.errors import UserError
from vitrail.evaluate.metrics import each_image
from vitrail.weights import Card

Numbers = NDArray[np.int64]


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
    tiles = [Tile(thumbnail(split.image(i)), say(i)) for i in chosen.tolist()]
    return sheet(Section(title, note, [tiles[at : at + across] for at in range(0, len(tiles), across)]))


def captions(card: Card, outputs: NDArray[np.floating], targets: NDArray[Any]) -> Callable[[int], list[Caption]]:
    """What to write under an image: what is true, and what was said in orange as far as it is wrong."""
    if card.task == "regression":
        return lambda i: _values(card, outputs[i], targets[i])
    chances = probabilities(card, outputs)
    if card.task == "multilabel":
        return lambda i: _labels(card, chances[i], targets[i])
    return lambda i: _classes(card, chances[i], int(targets[i]))


def _classes(card: Card, chances: NDArray[np.float64], target: int) -> list[Caption]:
    def name(k: int) -> str:
        return f"{card.classes[k]} {chances[k]:.1%}"

    first, *others = np.argsort(-chances, kind="stable").tolist()
    if first != target:
        return [Caption(f"true: {name(target)}"), Caption(f"said: {name(first)}", ORANGE)]
    return [Caption(f"right: {name(target)}"), *(Caption(f"next: {name(k)}", GREY) for k in others[:1])]


def _labels(card: Card, chances: NDArray[np.float64], target: NDArray[Any]) -> list[Caption]:
    true, given = target > 0.5, chances >= np.asarray(card.thresholds)

    def names(which: NDArray[np.bool_]) -> str:
        order = sorted(np.flatnonzero(which), key=lambda k: -abs(chances[k] - true[k]))
        return ", ".join(f"{card.classes[k]} {chances[k]:.0%}" for k in order)

    lines = [Caption(f"right: {names(true & given)}")] if (true & given).any() else []
    lines += [Caption(f"missed: {names(true & ~given)}", ORANGE)] if (true & ~given).any() else []
    lines += [Caption(f"wrongly: {names(given & ~true)}", ORANGE)] if (given & ~true).any() else []
    return lines or [Caption("right: (no label)")]


def _values(card: Card, output: NDArray[np.floating], target: NDArray[Any]) -> list[Caption]:
    """The number that is farthest off, in its units."""
    std, mean = np.asarray(card.target_std), np.asarray(card.target_mean)
    said = output * std + mean
    worst = int(np.argmax(np.abs(said - target) / std))
    name = f"{card.classes[worst]} " if len(card.classes) > 1 else ""
    return [Caption(f"true: {name}{target[worst]:.4g}"), Caption(f"said: {name}{said[worst]:.4g}", ORANGE)]
