"""Input weights of token mixing."""

from __future__ import annotations

import numpy as np
from families import build_tiny

from vitrail.explain import (
    mixing_maps,
)
from vitrail.explain.mixing import in_pairs


def test_mixing_maps_are_the_weights():
    model = build_tiny("mixer")
    maps = mixing_maps(model)
    assert maps.shape == (5, 12, 4, 2)
    weight = model.blocks[3].mlp_tokens.fc1.weight.detach().numpy()
    for row, column in np.ndindex(4, 2):
        np.testing.assert_array_equal(maps[3, :, row, column], weight[:, 2 * row + column])


def test_opposite_units_stand_side_by_side_from_low_to_high_frequency():
    x = np.arange(8)
    low, high = (np.tile(np.cos(2 * np.pi * waves * (x + 0.5) / 8), (8, 1)) for waves in (1, 3))
    weak = np.full((8, 8), 1e-3)
    maps = np.stack([high, low.T, weak, -high, -low.T, 0.5 * np.ones((8, 8))]).astype(np.float32)
    order = in_pairs(maps, count=5).tolist()
    assert [set(order[:2]), set(order[2:4]), order[4]] == [{1, 4}, {0, 3}, 5]
    assert sorted(in_pairs(maps)) == list(range(6))
