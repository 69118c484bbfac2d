"""What a model's own weights show without any image."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from peers import randomise

from vitrail.errors import UserError
from vitrail.explain import patch_filters, position_similarity, relative_bias
from vitrail.models import build, resize
from vitrail.models.vit import ViTConfig

BASE = {"width": 16, "depth": 2, "heads": 2, "mlp": 32, "patch": 4, "channels": 1, "classes": 5, "img_size": (12, 8)}


def make(**changes):
    return randomise(build(ViTConfig(**(BASE | changes))))


@pytest.mark.parametrize("pool", ["cls", "gap"])
@pytest.mark.parametrize("pos", ["learned", "learned2d", "sincos2d"])
def test_similarity_is_the_cosine_of_the_rows_that_are_added_to_patches(pos, pool):
    model = make(pos=pos, pool=pool, registers=2)
    similarity = position_similarity(model)
    assert similarity.shape == (3, 2, 3, 2)
    with torch.no_grad():
        rows = model.positions()[0, -6:].double().numpy()
    for a in range(6):
        for b in range(6):
            cosine = rows[a] @ rows[b] / np.sqrt((rows[a] @ rows[a]) * (rows[b] @ rows[b]))
            assert similarity[a // 2, a % 2, b // 2, b % 2] == pytest.approx(cosine, abs=1e-6)


def test_similarity_follows_the_size_of_the_model():
    assert position_similarity(resize(make(), (16, 20))).shape == (4, 5, 4, 5)


def test_models_without_position_embeddings_are_told():
    with pytest.raises(UserError, match="without positions"):
        position_similarity(make(pos="none"))
    with pytest.raises(UserError, match="relative"):
        position_similarity(make(pos="relative"))
    with pytest.raises(UserError, match="not relative"):
        relative_bias(make())


@pytest.mark.parametrize("registers", [0, 2])
def test_relative_biases_are_maps_around_the_patch_that_looks(registers):
    model = make(pos="relative", registers=registers)
    bias, prefix = relative_bias(model), model.config.prefix
    assert bias.shape == (2, 2, 5, 3)
    for layer, block in enumerate(model.blocks):
        with torch.no_grad():
            added = block.attn.relative()[0].numpy()  # H N N
        for query in range(6):
            for key in range(6):
                below, right = key // 2 - query // 2, key % 2 - query % 2
                np.testing.assert_array_equal(
                    bias[layer, :, 2 + below, 1 + right], added[:, prefix + query, prefix + key]
                )


@pytest.mark.parametrize("channels", [1, 3, 5])
def test_filters_are_principal_components(channels):
    from sklearn.decomposition import PCA

    model = make(channels=channels, width=64)
    filters = patch_filters(model, count=10)
    assert filters.shape == (10, 4, 4, channels)
    weight = model.patch_embed.proj.weight.detach().numpy().transpose(0, 2, 3, 1).reshape(64, -1)
    expected = PCA(10, svd_solver="full").fit(weight.astype(np.float64)).components_
    alike = np.abs(np.sum(filters.reshape(10, -1) * expected, axis=1))
    np.testing.assert_allclose(alike, 1, atol=1e-4)
    assert (filters.reshape(10, -1).max(axis=1) == np.abs(filters).reshape(10, -1).max(axis=1)).all()


def test_there_are_no_more_filters_than_directions():
    assert len(patch_filters(make(width=64))) == 16
    assert len(patch_filters(make(width=8))) == 7  # eight filters, less their mean


def test_a_conv_stem_has_no_patch_filters():
    with pytest.raises(UserError, match="no patch filters"):
        patch_filters(make(stem="conv"))
