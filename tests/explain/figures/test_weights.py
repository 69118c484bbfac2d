"""Figures of positions and filters."""

from __future__ import annotations

import numpy as np
import pytest

from vitrail.explain.figures import weights

RNG = np.random.Generator(np.random.PCG64(0))


def test_tiles_lie_where_their_numbers_say():
    tiles = np.arange(6, dtype=np.float32).reshape(2, 3, 1, 1) * np.ones((1, 1, 4, 4), np.float32)
    figure = weights.draw_bias(tiles)
    axes = figure.axes[0]
    whole = axes.images[0].get_array()
    middles = [(y, x) for y in axes.get_yticks() for x in axes.get_xticks()]
    assert [whole[int(y), int(x)] for y, x in middles] == [0, 1, 2, 3, 4, 5]
    assert np.ma.masked_invalid(whole).mask.any()


def test_a_large_grid_of_positions_is_drawn_in_part_with_its_own_numbers():
    axes = weights.draw_similarity(RNG.random((20, 3, 20, 3), dtype=np.float32)).axes[0]
    numbers = [int(label.get_text()) for label in axes.get_yticklabels()]
    assert len(numbers) == 14
    assert (numbers[0], numbers[-1]) == (0, 19)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "1", "2"]


def test_a_single_patch_has_positions_to_draw():
    weights.draw_similarity(np.ones((1, 1, 1, 1), np.float32)).canvas.draw()


def test_a_filter_that_died_is_drawn_grey():
    drawn = weights.draw_filters(np.zeros((1, 4, 4, 1), np.float32)).axes[0].images[0].get_array()
    assert (drawn == 0.5).all()


@pytest.mark.parametrize("channels", [1, 2, 3, 6])
def test_filters_of_any_number_of_bands(channels):
    components = RNG.standard_normal((9, 4, 4, channels)).astype(np.float32)
    axes = weights.draw_filters(components).axes[0]
    shape = axes.images[0].get_array().shape
    assert len(shape) == (3 if channels == 3 else 2)
    tiles = (9, channels) if channels in (2, 6) else (2, 7)
    assert (shape[0] / shape[1] > 1) == (tiles[0] > tiles[1])
