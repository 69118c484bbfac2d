"""Images that are decoded and resized once, not in every epoch."""

from __future__ import annotations

import math

import numpy as np

from vitrail.data.dataset import ArraySplit, Split
from vitrail.data.images import Pixels
from vitrail.data.loader import ReadySplit, batches
from vitrail.data.preprocess import Preprocess
from vitrail.progress import track

_IN_MEMORY = 2 * 2**30  # bytes of resized arrays that a split may take
_BATCH = 256


def once(split: Split, preprocess: Preprocess, workers: int = 2) -> Split:
    """A split that gives the same pixels, but where it can be has them ready."""
    shape = len(split), preprocess.channels, *preprocess.img_size
    if not isinstance(split, ArraySplit) or preprocess.keeps(split.pixels.shape[1:]) or math.prod(shape) > _IN_MEMORY:
        return split
    pixels = np.empty(shape, dtype=np.uint8)
    _fill(pixels, split, preprocess, workers)
    return ReadySplit(split, preprocess, pixels)


def _fill(pixels: Pixels, split: Split, preprocess: Preprocess, workers: int) -> None:
    at = 0
    reading = batches(split, preprocess, _BATCH, workers)
    for images, _ in track(reading, "resizing images", math.ceil(len(split) / _BATCH), "batch"):
        pixels[at : at + len(images)] = images.numpy()
        at += len(images)
