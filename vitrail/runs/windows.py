"""Sliding windows: a large picture at its own scale, in overlapping parts of the model's size, with logits averaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.data.pixels import Pixels
from vitrail.data.preprocess import Preprocess
from vitrail.tasks.placement import Box, Placement, Side

Array = NDArray[Any]

OVERLAP = 1 / 3  # of two neighbouring windows, as in SETR
_BATCH = 16  # windows


def boxes(size: Side, window: Side) -> list[Box]:
    """The windows of a picture; the last of a row or column is moved back to end at the border."""
    (height, width), (h, w) = size, window
    rows, columns = (
        [min(at, max(full - side, 0)) for at in range(0, max(full - side, 0) + _step(side), _step(side))]
        for full, side in ((height, h), (width, w))
    )
    return [(y, x, min(h, height), min(w, width)) for y in dict.fromkeys(rows) for x in dict.fromkeys(columns)]


def _step(side: int) -> int:
    return max(round(side * (1 - OVERLAP)), 1)


def slide(image: Pixels, preprocess: Preprocess, outputs: Callable[[Array], Array]) -> tuple[Array, Placement]:
    """The mean logits of all windows of a picture (H, W, C) for each of its pixels, (K, H, W), and their placement."""
    size = image.shape[0], image.shape[1]
    total: Array | None = None
    counts = np.zeros(size, np.float32)
    for parts in _batched(boxes(size, preprocess.img_size)):
        places = [Placement(size, preprocess.img_size, box, (0, 0, box[2], box[3])) for box in parts]
        found = outputs(np.stack([preprocess.place(image, place) for place in places]))
        for (y, x, h, w), place, logits in zip(parts, places, found, strict=True):
            total = np.zeros((len(logits), *size), np.float32) if total is None else total
            total[:, y : y + h, x : x + w] += place.restore(logits)
            counts[y : y + h, x : x + w] += 1
    assert total is not None
    return total / counts, Placement(size, size, (0, 0, *size), (0, 0, *size))


def _batched(parts: list[Box]) -> Iterator[list[Box]]:
    for at in range(0, len(parts), _BATCH):
        yield parts[at : at + _BATCH]
