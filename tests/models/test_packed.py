"""Packed linear layers compute what plain ones do, in every family."""

from __future__ import annotations

import pytest
import torch
from families import ATTENTIVE, TINY, batch
from peers import randomise
from torch import nn

from vitrail.models import build, configure
from vitrail.models.layers import Mlp
from vitrail.models.packed import PackedLinear, PackedMlp, pack

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")

VIT = {"img_size": 8, "stem": "patch", "classes": 3, "channels": 1}
VITS = {f"vit, {pool}": configure("vit_nano4", pool=pool, **VIT) for pool in ("cls", "gap", "map", "cls_dist")}
VITS["vit, swiglu"] = configure("vit_nano4", act="swiglu", **VIT)
CONFIGS = TINY | ATTENTIVE | VITS


@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_outputs_and_features_are_the_same_at_any_batch_size(name):
    model = randomise(build(CONFIGS[name])).eval()
    packed = pack(model)
    for images in batch(model, 5).split([3, 1, 1]):
        torch.testing.assert_close(packed(images), model(images), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(packed.embed(images), model.embed(images), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU does not compute in bf16")
@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_bf16_is_close(name):
    model = randomise(build(CONFIGS[name])).eval()
    packed, images = pack(model, torch.bfloat16), batch(model, 5)
    with torch.autocast("cpu", torch.bfloat16):
        given = packed(images).float()
    expected = model(images)
    assert 0 < (given - expected).abs().max() < 0.05 * expected.abs().max()


def test_the_copy_shares_its_parameters_and_leaves_the_model_alone():
    model = build(VITS["vit, cls"]).eval()
    packed = pack(model)
    shared = dict(model.named_parameters())
    assert {name: id(value) for name, value in packed.named_parameters()} == {k: id(v) for k, v in shared.items()}
    assert not any(isinstance(module, PackedLinear | PackedMlp) for module in model.modules())
    assert not any(type(module) in (nn.Linear, Mlp) for module in packed.modules())
