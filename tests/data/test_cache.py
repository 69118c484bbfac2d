"""Pixels that are kept are those that would have been read."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vitrail.data import ArraySplit
from vitrail.data.cache import once
from vitrail.data.loader import TrainBatches, batches
from vitrail.data.preprocess import Preprocess


def arrays(n: int = 20, size: int = 10, channels: int = 1) -> ArraySplit:
    pixels = np.random.default_rng(0).integers(0, 256, (n, size, size, channels), dtype=np.uint8)
    return ArraySplit(pixels, np.arange(n), "noise")


@pytest.mark.parametrize("preprocess", [Preprocess((14, 12), 1), Preprocess((10, 10), 3), Preprocess((8, 8), 1, 0.5)])
def test_arrays_of_another_size_are_resized_once(preprocess):
    split = arrays()
    direct = list(TrainBatches(split, preprocess, 6, seed=0).epoch(1))
    kept = once(split, preprocess)
    split.pixels[:] = 0  # what is not kept is lost now
    for (a, x), (b, y) in zip(direct, TrainBatches(kept, preprocess, 6, seed=0).epoch(1), strict=True):
        assert torch.equal(a, b)
        assert b.is_contiguous()
        assert torch.equal(x, y)


def test_arrays_of_the_right_size_are_not_copied():
    split = arrays()
    assert once(split, Preprocess((10, 10), 1)) is split


def test_kept_pixels_serve_only_the_preprocessing_that_made_them():
    split, other = arrays(), Preprocess((14, 14), 1, 0.8)
    kept = once(split, Preprocess((14, 14), 1))
    (found, _), (expected, _) = next(batches(kept, other, 20)), next(batches(split, other, 20))
    assert torch.equal(found, expected)
