"""Class relevance from the last feature map."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from families import TINY, build_tiny, pictures
from torch import Tensor, nn

from vitrail.errors import UserError
from vitrail.explain import (
    relevance,
)
from vitrail.models import head

AVERAGED = ("bit", "mixer", "swin", "swin_v2", "pvt_v2")  # and a linear head reads the average


@pytest.mark.parametrize("name", AVERAGED)
def test_contributions_sum_to_the_logit(name):
    model, images = build_tiny(name).double(), pictures().double()  # the parts are larger than their sum
    with torch.no_grad():
        logits = model(images) - head(model).bias
    maps = relevance(model, images, [2, 0])
    assert maps.shape == (2, *model.config.grid)
    np.testing.assert_allclose(maps.sum(axis=(1, 2)), logits[[0, 1], [2, 0]], rtol=1e-4, atol=1e-5)
    against = relevance(model, images, [2, 0], instead=1)
    np.testing.assert_allclose(against, maps - relevance(model, images, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", list(TINY)[:-1])
def test_contributions_match_finite_differences(name):
    """Against a finite difference: the features of one place a little more, and a little less."""
    model, images = build_tiny(name).double(), pictures(1).double()
    module: nn.Module = {
        "bit": lambda: model.norm,
        "mixer": lambda: model.norm,
        "swin": lambda: model.norm,
        "swin_v2": lambda: model.norm,
        "pvt": lambda: model.block2[-1].norm1,
        "pvt_v2": lambda: model.layers[-1].norm,
        "coatnet": lambda: model.layers[-1].blocks[-1],
    }[name]()
    h, w = model.config.grid

    def logit(place: int, change: float) -> float:
        def scale(_: nn.Module, __: Any, output: Tensor) -> Tensor:
            scales = torch.ones(h * w, dtype=output.dtype)
            scales[place] += change
            if name == "pvt":
                return output * torch.cat([torch.ones(1), scales])[:, None]  # a class token comes first
            if name in ("mixer", "pvt_v2"):
                return output * scales[:, None]
            return output * (scales.reshape(h, w, 1) if name.startswith("swin") else scales.reshape(h, w))

        with module.register_forward_hook(scale), torch.no_grad():
            return float(model(images)[0, 1])

    found = relevance(model, images, 1)[0].ravel()
    slopes = [(logit(place, 1e-4) - logit(place, -1e-4)) / 2e-4 for place in range(h * w)]
    np.testing.assert_allclose(found, slopes, rtol=1e-3, atol=1e-6)
    assert np.abs(found).max() > 1e-3


def test_relevance_leaves_no_hooks_modes_or_gradients():
    model, images = build_tiny("coatnet").train(), pictures()
    expected = relevance(model, images, 0)
    assert model.training
    with torch.inference_mode():
        np.testing.assert_array_equal(relevance(model, images.clone(), 0), expected)
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    compiled = torch.compile(model, backend="eager")
    np.testing.assert_array_equal(relevance(compiled, images, 0), expected)


def test_classes_that_do_not_exist_are_refused():
    with pytest.raises(UserError, match="from 0 to 2"):
        relevance(build_tiny("bit"), pictures(), 3)
