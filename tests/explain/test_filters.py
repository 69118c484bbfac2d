"""Filters of the first layer."""

from __future__ import annotations

import numpy as np
import pytest
from families import build_tiny
from peers import randomise

from vitrail.errors import UserError
from vitrail.explain import (
    conv_filters,
    patch_filters,
)
from vitrail.models import build
from vitrail.models.vit import ViTConfig

BASE = {"width": 16, "depth": 2, "heads": 2, "mlp": 32, "patch": 4, "channels": 1, "classes": 5, "img_size": (12, 8)}


def make(**changes):
    return randomise(build(ViTConfig(**(BASE | changes))))


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


@pytest.mark.parametrize("name", ["bit", "hybrid"])
def test_standardised_filters_are_shown_as_they_are_applied(name):
    model = build_tiny(name)
    conv = model.stem.conv if name == "bit" else model.patch_embed.backbone.stem.conv
    found = conv_filters(model, count=5)
    expected = conv.weight.detach()[:5].permute(0, 2, 3, 1).numpy()
    spread = expected.std(axis=(1, 2, 3), keepdims=True)
    np.testing.assert_allclose(found, (expected - expected.mean(axis=(1, 2, 3), keepdims=True)) / spread, rtol=1e-4)


@pytest.mark.parametrize("name", ["coatnet", "pvt_v2"])
def test_other_filters_are_the_weights_the_largest_first(name):
    model = build_tiny(name)
    weight = (model.stem.conv1 if name == "coatnet" else model.patch_embed.proj).weight.detach().numpy()
    order = np.argsort(-np.linalg.norm(weight.reshape(len(weight), -1), axis=1))
    np.testing.assert_array_equal(conv_filters(model), weight.transpose(0, 2, 3, 1)[order])


@pytest.mark.parametrize(("name", "shape"), [("mixer", (15, 4, 4, 1)), ("swin", (4, 2, 2, 1)), ("pvt", (4, 2, 2, 1))])
def test_patches_are_read_by_components(name, shape):
    components = patch_filters(build_tiny(name))
    assert components.shape == shape
    flat = components.reshape(len(components), -1)
    np.testing.assert_allclose(flat @ flat.T, np.eye(len(flat)), atol=1e-6)


def test_overlapping_convolutions_read_no_patches():
    with pytest.raises(UserError, match="no patch filters"):
        patch_filters(build_tiny("bit"))
