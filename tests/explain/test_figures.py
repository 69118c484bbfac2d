"""Figures show what the arrays hold."""

from __future__ import annotations

import numpy as np
import pytest

from vitrail.explain.figures import attention, weights

RNG = np.random.Generator(np.random.PCG64(0))


def test_an_overlay_keeps_the_picture_where_attention_is_highest_and_darkens_the_rest():
    view = np.full((32, 48, 3), 200, np.uint8)
    weights = np.zeros((4, 6), np.float32)
    weights[1, 2] = 1
    lit = attention.overlay(view, weights)
    assert lit.shape == (224, 336, 3)
    assert lit[84, 140, 0] > 190  # the middle of the patch
    assert lit[200, 300, 0] < 20


def test_a_map_is_drawn_in_its_own_patches():
    weights = np.array([[0, 1], [0.5, 0.25]], np.float32)
    drawn = attention.heat(weights, (8, 12))
    assert drawn.shape == (8, 12, 3)
    blocks = drawn.reshape(2, 4, 2, 6, 3)
    assert (blocks == blocks[:, :1, :, :1]).all()
    light = blocks[:, 0, :, 0].astype(int).sum(-1)
    assert light[0, 0] < light[1, 1] < light[1, 0] < light[0, 1]


def test_tiles_lie_where_their_numbers_say():
    tiles = np.arange(6, dtype=np.float32).reshape(2, 3, 1, 1) * np.ones((1, 1, 4, 4), np.float32)
    figure = weights.draw_bias(tiles)
    axes = figure.axes[0]
    whole = axes.images[0].get_array()
    middles = [(y, x) for y in axes.get_yticks() for x in axes.get_xticks()]
    assert [whole[int(y), int(x)] for y, x in middles] == [0, 1, 2, 3, 4, 5]
    assert np.ma.masked_invalid(whole).mask.any()


@pytest.mark.parametrize(("count", "across"), [(1, 1), (5, 3)])
def test_every_picture_of_a_rollout_has_its_caption(count, across):
    views = [RNG.integers(0, 255, (16, 8, 3), dtype=np.uint8) for _ in range(count)]
    maps = RNG.random((count, 4, 2), dtype=np.float32)
    captions = [f"class {i} $5" for i in range(count)]
    figure = attention.draw_rollouts(views, maps, captions, [True] * count)
    drawn = [axes for axes in figure.axes if axes.images]
    assert [axes.get_title(loc="left") for axes in drawn] == captions
    left = {round(axes.get_position().x0, 3) for axes in drawn}
    assert len(left) == across


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


def test_the_chosen_patch_is_marked_in_every_map_and_in_the_picture():
    maps = RNG.random((2, 3, 4, 6), dtype=np.float32)
    view = np.zeros((16, 24, 3), np.uint8)
    left, right = attention.draw_heads(view, maps, "a", patch=(1, 2)).axes
    assert [patch.get_bbox().bounds for patch in left.patches] == [(2, 1, 1, 1)]
    assert len(right.patches) == 6
    assert not attention.draw_heads(view, maps, "a").axes[1].patches
