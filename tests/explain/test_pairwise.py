"""Attention between all patches is that of each single patch, in every family."""

from __future__ import annotations

import numpy as np
import pytest
from families import ATTENTIVE, batch
from peers import randomise
from saved import CONFIG, images

from vitrail.explain import attention_maps, patch_attention
from vitrail.explain.geometry import geometries
from vitrail.explain.pairwise import pairwise_attention
from vitrail.models import build


def made(name):
    model = randomise(build(CONFIG if name == "vit" else ATTENTIVE[name])).eval()
    return model, images(CONFIG, 1) if name == "vit" else batch(model, 1)


@pytest.mark.parametrize("name", ["vit", *ATTENTIVE])
def test_rows_are_the_attention_of_patches(name):
    model, image = made(name)
    layers, maps = pairwise_attention(model, image), attention_maps(model, image)
    first = geometries(model)[0]
    for layer, whole in zip(layers, maps, strict=True):
        np.testing.assert_allclose(layer.weights[:, 0], whole[0].reshape(len(whole[0]), -1), rtol=1e-4, atol=1e-6)
    for row, column in ((0, 0), (first.grid[0] - 1, first.grid[1] // 2)):
        for layer, geometry, of_patch in zip(
            layers, geometries(model), patch_attention(model, image, row, column), strict=True
        ):
            merged = geometry.pixels // first.pixels
            cell = row // merged * layer.grid[1] + column // merged
            expected = of_patch[0].reshape(len(of_patch[0]), -1)
            np.testing.assert_allclose(layer.weights[:, 1 + cell], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["vit", "swin, padded"])
def test_large_grids_are_merged(name):
    model, image = made(name)
    fine, coarse = pairwise_attention(model, image), pairwise_attention(model, image, most=500)
    assert sum(layer.weights.size for layer in coarse) <= 500
    by = next(by for by in (2, 4, 8, 16) if tuple(-(-side // by) for side in fine[0].grid) == coarse[0].grid)
    for small, large in zip(coarse, fine, strict=True):
        assert small.grid < large.grid
        # Row 0 is the same attention; a cell gets what its patches get.
        np.testing.assert_allclose(small.weights[:, 0].sum(-1), large.weights[:, 0].sum(-1), rtol=1e-4)
        h, w = large.grid
        corner = [y * w + x for y in range(min(by, h)) for x in range(min(by, w))]
        between = large.weights[:, 1:][:, corner][:, :, corner].sum(-1).mean(-1)
        np.testing.assert_allclose(small.weights[:, 1, 0], between, rtol=1e-4)
