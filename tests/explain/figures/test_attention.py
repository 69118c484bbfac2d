"""Figures of attention."""

from __future__ import annotations

import numpy as np
import pytest

from vitrail.explain.figures import attention
from vitrail.explain.figures.tiles import spacing

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


def test_the_chosen_patch_is_marked_in_every_map_and_in_the_picture():
    maps = RNG.random((2, 3, 4, 6), dtype=np.float32)
    view = np.zeros((16, 24, 3), np.uint8)
    left, right = attention.draw_heads(view, maps, "a", patch=(1, 2)).axes
    assert [patch.get_bbox().bounds for patch in left.patches] == [(2, 1, 1, 1)]
    assert len(right.patches) == 6
    assert not attention.draw_heads(view, maps, "a").axes[1].patches


def test_coarser_maps_cover_the_patches_that_were_merged_in_them():
    maps = [np.arange(35, dtype=np.float32).reshape(1, 7, 5), np.arange(4, dtype=np.float32).reshape(2, 2, 1)]
    left, right = attention.draw_heads(np.zeros((7, 5, 3), np.uint8), maps, "a", patch=(5, 4)).axes
    drawn = right.images[0].get_array()
    tall, wide, gap = spacing(7, 5)
    size = tall // 7
    second = drawn[tall + gap :, :wide][::size, ::size][:7, :5]  # the first head of the second layer
    assert (second[:4] == 0).all()
    assert (second[4:] == 1).all()
    assert np.isnan(drawn[:tall, wide + gap :].filled(np.nan)).all()  # the first layer has no second head
    assert [patch.get_bbox().bounds for patch in left.patches] == [(4, 5, 1, 1)]
    framed = [tuple(round(n / size) for n in (patch.get_width(), patch.get_height())) for patch in right.patches]
    assert framed == [(1, 1), (5, 3), (5, 3)]  # of 4 by 8 patches, those that there are
    assert [label.get_text() for label in right.get_yticklabels()] == ["7×5   1", "2×1   2"]


def test_of_many_layers_and_heads_a_selection_is_drawn_and_noted():
    maps = np.random.default_rng(0).random((30, 20, 2, 2), dtype=np.float32)
    right = attention.draw_heads(np.zeros((4, 4, 3), np.uint8), list(maps), "a").axes[1]
    rows = [label.get_text() for label in right.get_yticklabels()]
    assert (len(rows), rows[0], rows[-1]) == (24, "1", "30")
    assert any("24 of 30 layers; 16 of up to 20 heads" in text.get_text() for text in right.texts)


def test_one_bright_patch_does_not_blacken_the_rest():
    """As in DINO, where single patches collect most of the attention."""
    even = np.linspace(0.5, 1.5, 256, dtype=np.float32).reshape(16, 16)
    assert attention.brightest(even) == even.max()
    outlier = even.copy()
    outlier[0, 3] = 40
    assert attention.brightest(outlier) < 4
    assert attention.heat(outlier, (16, 16))[8, 8].sum() > attention.heat(outlier, (16, 16))[0, 0].sum()
    lone = np.zeros((4, 4), np.float32)
    lone[1, 2] = 1  # as sparse as it can be
    assert 0 < attention.brightest(lone) <= 1
