"""A Swin's windows: what is seen in them lies where it is in the picture."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from peers import randomise
from torch import Tensor

from vitrail.explain import attention_distance, patch_attention, window_attention
from vitrail.explain.attention import even_distance
from vitrail.explain.geometry import attentions, window_geometries
from vitrail.explain.windows import Windows
from vitrail.models.swin import Swin, SwinConfig, WindowAttention

# In the second stage, of 4 by 6 patches, windows are padded.
CONFIG = SwinConfig((8, 12), (2, 2), (2, 3), window=4, patch=2, img_size=(16, 24), channels=1, classes=3)


def images() -> Tensor:
    return torch.randn(2, 1, 16, 24, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("grid", [(8, 8), (8, 12), (7, 11), (9, 5), (4, 4), (3, 2), (4, 9)])
@pytest.mark.parametrize("shifted", [False, True])
def test_what_windows_see_lies_where_the_layer_has_it(grid, shifted):
    """The assembled maps times the values of the whole picture are what the layer computes, shifted or padded."""
    torch.manual_seed(0)
    layer = randomise(WindowAttention(12, 3, grid, 4, shifted, 0.0))
    torch.nn.init.zeros_(layer.qkv.bias)  # so that the values of the padding are zero
    geometry = Windows(grid, 2, 3, 4, (*layer.windows.shift,))
    x = torch.randn(2, *grid, 12)
    count = grid[0] * grid[1]
    with torch.no_grad():
        weights = layer.weights(x)
        value = layer.qkv(x).chunk(3, dim=-1)[2].flatten(1, 2).unflatten(2, (3, -1)).transpose(1, 2)  # B H N D/H
        maps = torch.stack([geometry.follow(row[None], weights) for row in torch.eye(count)], dim=2)  # B H N N
        mixed = (maps @ value).transpose(1, 2).flatten(2)
        torch.testing.assert_close(layer.proj(mixed).unflatten(1, grid), layer(x))
    assert weights[0].numel() == geometry.size


@pytest.mark.parametrize("grid", [(8, 12), (7, 7), (9, 5), (5, 10), (3, 11)])
def test_even_distance_is_that_of_layers_that_see_all_alike(grid):
    """In a shifted layer whose map is padded, places of opposite edges see each other."""
    model = Swin(SwinConfig((8,), (2,), (2,), window=4, patch=1, img_size=grid, channels=1, classes=3))
    for layer in (found.module for found in attentions(model)):
        for parameter in layer.parameters():
            torch.nn.init.zeros_(parameter)
    far = attention_distance(model, [torch.randn(1, 1, *grid)])
    np.testing.assert_allclose(even_distance(model), far[:, 0], rtol=1e-5)


def test_parts_of_a_window_that_are_kept_apart_have_an_edge_between_them():
    assert Windows((7, 9), 1, 1, 4, (2, 2)).edges() == ([0, 1, 2, 6, 7], [0, 1, 2, 6, 9])


@pytest.mark.parametrize(("shift", "expected"), [((0, 0), [0, 4, 8, 10]), ((2, 2), [0, 2, 6, 10])])
def test_windows_are_cut_where_they_begin(shift, expected):
    down, across = Windows((10, 12), 1, 1, 4, shift).edges()
    assert down == expected
    assert across == ([0, 4, 8, 12] if shift == (0, 0) else [0, 2, 6, 10, 12])


def test_the_middle_of_each_window_looks_within_it():
    torch.manual_seed(0)
    model = randomise(Swin(CONFIG))
    maps = window_attention(model, images())
    for number, geometry in enumerate(
        window_geometries(model)[:2]
    ):  # one plain, one shifted, whose windows are not padded
        down, across = geometry.edges()
        middles = iter(geometry.middles().tolist())
        for top, bottom in pairwise(down):
            for left, right in pairwise(across):
                y, x = divmod(next(middles), geometry.grid[1])
                assert top <= y < bottom
                assert left <= x < right
                window = maps[number][:, top:bottom, left:right]
                np.testing.assert_allclose(window.sum(axis=(1, 2)), 1, atol=1e-5)
                alone = patch_attention(model, images(), y, x)[number].mean(axis=1)
                np.testing.assert_allclose(alone[:, top:bottom, left:right], window, atol=1e-6)


def test_distance_in_windows_that_are_seen_evenly_is_the_mean_distance():
    torch.manual_seed(0)
    model = Swin(CONFIG)
    for layer in (found.module for found in attentions(model)):
        for parameter in layer.parameters():
            torch.nn.init.zeros_(parameter)
    expected = []
    for geometry in window_geometries(model):
        pieces = [
            (bottom - top, right - left)
            for top, bottom in pairwise(geometry.edges()[0])
            for left, right in pairwise(geometry.edges()[1])
        ]
        tokens = sum(h * w for h, w in pieces)
        expected.append(sum(h * w * mean_distance(h, w) for h, w in pieces) / tokens * geometry.pixels)
    far = attention_distance(model, [images()])
    for row, value in zip(far, expected, strict=True):
        np.testing.assert_allclose(row[~np.isnan(row)], value, rtol=1e-5)
    np.testing.assert_allclose(far[0, 0], 2 * mean_distance(4, 4), rtol=1e-5)  # its windows are whole
    np.testing.assert_allclose(even_distance(model), expected, rtol=1e-5)


def mean_distance(h: int, w: int) -> float:
    """Between all pairs of h by w places: there are (h - |dy|)·(w - |dx|) with each offset."""
    offsets = [(dy, dx) for dy in range(1 - h, h) for dx in range(1 - w, w)]
    return sum((h - abs(dy)) * (w - abs(dx)) * math.hypot(dy, dx) for dy, dx in offsets) / (h * w) ** 2
