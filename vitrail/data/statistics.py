"""Per-channel mean and standard deviation of a data set."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from vitrail.config import Floats
from vitrail.data.dataset import Split
from vitrail.data.loader import batches
from vitrail.data.pixels import WHITE
from vitrail.data.preprocess import Preprocess
from vitrail.progress import track

MAX_IMAGES = 2000  # more images do not change the rounded result
_BATCH = 64


def mean_and_std(split: Split, preprocess: Preprocess, workers: int = 2) -> tuple[Floats, Floats]:
    """Mean and standard deviation of the preprocessed pixels, rounded to four significant digits.

    Computed on the whole split, or on `MAX_IMAGES` evenly spaced images. A constant channel gets a standard deviation
    of 1, to avoid division by zero.
    """
    chosen = np.linspace(0, len(split) - 1, min(len(split), MAX_IMAGES)).round().astype(np.int64)
    reading = batches(split, preprocess, _BATCH, workers, chosen.tolist())
    count, total, squares = 0, np.zeros(preprocess.channels), np.zeros(preprocess.channels)
    for pixels, _ in track(reading, "measuring", math.ceil(len(chosen) / _BATCH), "batch"):
        values = pixels.to(torch.float64) / WHITE[preprocess.bits]
        count += values[:, 0].numel()
        total += values.sum((0, 2, 3)).numpy()
        squares += values.square().sum((0, 2, 3)).numpy()
    mean = total / count
    std = np.sqrt(np.maximum(squares / count - mean**2, 0))
    std[std < 1e-6 * np.maximum(np.abs(mean), 1e-6)] = 1
    return _round(mean), _round(std)


def _round(values: npt.NDArray[np.float64]) -> Floats:
    return tuple(float(f"{value:.4g}") for value in values)
