"""Placement: how an image lies in the model's input, so that masks and boxes move with its pixels, there and back.

A part of the image (`box`) is resized to a part of the input (`shown`); the rest of the input is padding. In evaluation
the whole image fits into the input, at its top left. Training draws the scale, the part and the mirroring.

Coordinates are in pixels, from the top left corner of the first pixel: the centre of the first pixel is (0.5, 0.5).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Side = tuple[int, int]  # height, width
Box = tuple[int, int, int, int]  # y, x, height, width


@dataclass(frozen=True)
class Placement:
    """Where an image lies in the model's input."""

    size: Side  # of the image, upright
    input: Side  # of the model's input
    box: Box  # the part of the image that is shown
    shown: Box  # where it is shown in the input; the rest is padding
    mirror: bool = False  # whether left and right of the input are swapped

    def forward(self, points: Array) -> Array:
        """Points (…, 2) of the image, x and y, in the input."""
        (top, left, height, width), (y, x, h, w) = self.box, self.shown
        moved = (points - (left, top)) * (w / width, h / height) + (x, y)
        return moved * (-1, 1) + (self.input[1], 0) if self.mirror else moved

    def back(self, points: Array) -> Array:
        """Points (…, 2) of the input, x and y, in the image: the inverse of `forward`."""
        (top, left, height, width), (y, x, h, w) = self.box, self.shown
        points = points * (-1, 1) + (self.input[1], 0) if self.mirror else points
        moved: Array = (points - (x, y)) * (width / w, height / h) + (left, top)
        return moved

    def labels(self, mask: Array, nothing: int) -> Array:
        """A mask (H, W) of the image as it lies in the input, (h, w): nearest pixels, and `nothing` in the padding."""
        (top, left, height, width), (y, x, h, w) = self.box, self.shown
        rows = top + (2 * np.arange(h) + 1) * height // (2 * h)
        columns = left + (2 * np.arange(w) + 1) * width // (2 * w)
        placed = np.full(self.input, nothing, mask.dtype)
        placed[y : y + h, x : x + w] = mask[rows[:, None], columns]
        return placed[:, ::-1] if self.mirror else placed

    def restore(self, values: Array) -> Array:
        """Values (K, h, w) on a grid over the input, such as logits, for each pixel of the box: bilinear."""
        values = values[:, :, ::-1] if self.mirror else values
        if values.shape[1:] == self.size == self.input == self.shown[2:]:
            return np.asarray(values, np.float32)
        (_, _, height, width), (y, x, h, w) = self.box, self.shown
        rows = _weights(height, y / self.input[0], h / self.input[0], values.shape[1])
        columns = _weights(width, x / self.input[1], w / self.input[1], values.shape[2])
        return np.asarray(rows @ values @ columns.T, np.float32)


class Truth(NamedTuple):
    """The annotation of an image, and how the image was placed into the input: what a meter compares outputs with."""

    annotation: Any
    placement: Placement


def truths(annotations: Sequence[Any] | Array, placements: Iterable[Placement]) -> Array:
    """The truth of each image, (N,) objects."""
    return object_array([Truth(*pair) for pair in zip(annotations, placements, strict=True)])


def object_array(values: Sequence[Any]) -> Array:
    """An (N,) array of any objects, such as annotations; NumPy itself would make a matrix of arrays of one shape."""
    found = np.empty(len(values), object)
    for i, value in enumerate(values):
        found[i] = value
    return found


def fitted(size: Side, input: Side) -> Placement:
    """The whole image, as large as fits into the input, at its top left; `export.frame` does the same in a graph."""
    (height, width), (h, w) = size, input
    shown = min(h, max(height * w // width, 1)), min(w, max(width * h // height, 1))
    return Placement(size, input, (0, 0, *size), (0, 0, *shown))


def drawn(size: Side, input: Side, least: float, mirror: float, rng: np.random.Generator) -> Placement:
    """A random placement: smaller or larger than `fitted` by up to the factor `least` of the area, anywhere.

    With a `least` of 0.25 sides are scaled by 0.5 to 2: what does not fit is cut off, what is left over is padding.
    `mirror` is the probability of mirroring.
    """
    flip = bool(rng.random() < mirror)
    if least == 1:
        return replace(fitted(size, input), mirror=flip)
    widest = -0.5 * math.log(least)
    scale = min(side / full for side, full in zip(input, size, strict=True)) * math.exp(rng.uniform(-widest, widest))
    (top, height, y, h), (left, width, x, w) = (
        _axis(full, side, scale, rng) for full, side in zip(size, input, strict=True)
    )
    return Placement(size, input, (top, left, height, width), (y, x, h, w), flip)


def _axis(full: int, side: int, scale: float, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """The part of an axis of the image, and where it is shown: start and length each."""
    if full * scale > side:
        part = min(max(round(side / scale), 1), full)
        return int(rng.integers(full - part + 1)), part, 0, side
    shown = min(max(round(full * scale), 1), side)
    return 0, full, int(rng.integers(side - shown + 1)), shown


def _weights(pixels: int, start: float, share: float, cells: int) -> NDArray[np.float32]:
    """The weight of each of `cells` values in each pixel: (pixels, cells).

    The cells cover the input; the pixels lie in it from `start`, over this `share`.
    """
    centres = (start + (np.arange(pixels) + 0.5) / pixels * share) * cells
    weights = np.maximum(1 - np.abs(np.arange(cells) + 0.5 - centres[:, None]), 0)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True), np.float32)
