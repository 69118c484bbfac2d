"""The blockwise search for near-duplicates finds the same pairs as a full comparison."""

from __future__ import annotations

import numpy as np

from vitrail.data.audit.near_duplicates import near_pairs, signatures


def test_the_search_finds_what_a_full_comparison_finds_across_blocks():
    rng = np.random.default_rng(0)
    thumbnails = rng.integers(0, 256, (5000, 16, 16), np.uint8)
    thumbnails[4900] = thumbnails[7]  # in val and train, blocks apart
    thumbnails[4501] = thumbnails[4500]
    thumbnails[1300] = thumbnails[1299]
    pairs = near_pairs(signatures(thumbnails), ["train"] * 4400 + ["val"] * 600)
    assert sorted((a, b) for a, b, _ in pairs) == [(7, 4900), (1299, 1300), (4500, 4501)]
