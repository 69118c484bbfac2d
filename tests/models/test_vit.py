"""The same weights give the same numbers as timm, Hugging Face and a direct computation."""

from __future__ import annotations

import numpy as np
import peers
import pytest
import torch
from peers import TOLERANCE, distance, hf_vit, images, randomise, timm_features, timm_vit
from torch import Tensor, nn

from vitrail import models
from vitrail.models.layers import Attention
from vitrail.models.position import RelativeBias, resample, sincos2d
from vitrail.models.vit import ViT, ViTConfig

SMALL = {"width": 64, "depth": 3, "heads": 4, "mlp": 256, "patch": 8, "classes": 10}


def small(**changes: object) -> ViTConfig:
    return ViTConfig(**{**SMALL, "img_size": (32, 32), **changes})


@torch.no_grad()
def agree(config: ViTConfig, theirs: nn.Module, state: dict[str, Tensor]) -> None:
    """Our model with their weights gives their logits, and the features that their head reads."""
    ours = ViT(config).eval()
    ours.load_state_dict(state, strict=True)
    x = images(config)
    assert distance(ours.embed(x), timm_features(theirs, x)) < TOLERANCE
    assert distance(ours(x), theirs(x)) < TOLERANCE


SIZES = pytest.mark.parametrize("img_size", [(32, 32), (32, 48)], ids=["square", "rectangular"])
POOLS = pytest.mark.parametrize("pool", ["cls", "cls_dist", "gap", "map"])


@SIZES
@POOLS
def test_timm_weights_load_by_name_and_give_the_same_logits(pool, img_size):
    config = small(pool=pool, img_size=img_size)
    theirs = timm_vit(config)
    agree(config, theirs, theirs.state_dict())


@torch.no_grad()
@pytest.mark.parametrize("pool", ["cls", "gap", "map"])
def test_hidden_tanh_layer_stands_between_timms_features_and_its_head(pool):
    config = small(pool=pool, head="tanh")
    theirs, hidden = timm_vit(config), randomise(nn.Linear(config.width, config.width))
    ours = ViT(config).eval()
    ours.load_state_dict(
        theirs.state_dict() | {f"pre_logits.{name}": value for name, value in hidden.state_dict().items()}
    )
    x = images(config)
    features = timm_features(theirs, x)
    assert distance(ours(x), theirs.head(torch.tanh(hidden(features)))) < TOLERANCE


def test_timm_other_channels():
    config = small(channels=1)
    theirs = timm_vit(config)
    agree(config, theirs, theirs.state_dict())


@POOLS
def test_timm_layer_scale(pool):
    config = small(pool=pool, layer_scale=0.1)
    theirs = timm_vit(config)
    agree(config, theirs, theirs.state_dict())


@pytest.mark.parametrize("pool", ["cls", "gap", "map"])
def test_timm_registers_have_no_position_and_are_not_pooled(pool):
    """timm gives either all prefix tokens a position or none: ours is the second, with a zero row for the class."""
    config = small(pool=pool, registers=3)
    theirs = timm_vit(config, no_embed_class=True)
    state = theirs.state_dict()
    if pool == "cls":
        state["pos_embed"] = torch.cat([torch.zeros(1, 1, config.width), state["pos_embed"]], dim=1)
    agree(config, theirs, state)


@pytest.mark.parametrize("pool", ["cls", "gap"])
def test_timm_gated_mlps(pool):
    config = small(pool=pool, act="swiglu", mlp=176)
    theirs = timm_vit(config)
    agree(config, theirs, theirs.state_dict())


def test_timm_full_size():
    config = models.configure("vit_ti16")
    theirs = timm_vit(config)
    agree(config, theirs, theirs.state_dict())


@torch.no_grad()
@pytest.mark.parametrize("grid", [(3, 3), (2, 4)])
def test_relative_positions_are_those_of_timms_beit(grid):
    theirs = peers.timm("timm.models.beit").Attention(64, 4, qkv_bias=True, window_size=grid)
    theirs = randomise(theirs)
    ours = Attention(64, 4, relative=RelativeBias(grid, heads=4, prefix=1)).eval()
    theirs_state = theirs.state_dict()
    q, v = theirs_state.pop("q_bias"), theirs_state.pop("v_bias")
    theirs_state["qkv.bias"] = torch.cat([q, torch.zeros_like(q), v])  # BEiT has no bias on the keys
    theirs_state["relative.table"] = theirs_state.pop("relative_position_bias_table")
    ours.load_state_dict(theirs_state, strict=True)
    x = torch.randn(2, 1 + grid[0] * grid[1], 64, generator=torch.Generator().manual_seed(1))
    assert distance(ours(x), theirs(x)) < TOLERANCE


@pytest.mark.parametrize("new", [(6, 6), (3, 2), (5, 9)])
def test_positions_are_resampled_as_timm_does(new):
    old = (4, 4)
    table = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    theirs = peers.timm("timm.layers").resample_abs_pos_embed(
        table[None], new_size=new, old_size=old, num_prefix_tokens=0
    )
    assert distance(resample(table, old, new), theirs[0]) < TOLERANCE


@pytest.mark.parametrize("grid", [(7, 7), (3, 5)])
def test_sincos2d_is_big_visions_formula(grid):
    h, w = grid
    width = 64
    omega = 1.0 / 10_000 ** (np.arange(width // 4) / (width // 4 - 1))
    expected = np.empty((h * w, width))
    for row in range(h):
        for column in range(w):
            x, y = column * omega, row * omega
            expected[row * w + column] = np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)])
    assert distance(sincos2d(grid, width).double(), torch.from_numpy(expected)) < TOLERANCE


HF_KEYS = {
    "embeddings.cls_token": "cls_token",
    "embeddings.position_embeddings": "pos_embed",
    "embeddings.patch_embeddings.projection": "patch_embed.proj",
    "layernorm": "norm",
    "pooler.dense": "pre_logits",
    "classifier": "head",
}
HF_BLOCK_KEYS = {
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
    "attention.o_proj": "attn.proj",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}


def from_hugging_face(state: dict[str, Tensor], depth: int) -> dict[str, Tensor]:
    """Hugging Face's ViT under our names: q, k and v concatenated, everything else renamed. Nothing may be left."""
    state = {name.removeprefix("vit."): value for name, value in state.items()}
    ours = {}
    keys = dict(HF_KEYS)
    for i in range(depth):
        keys |= {f"layers.{i}.{old}": f"blocks.{i}.{new}" for old, new in HF_BLOCK_KEYS.items()}
        for kind in ("weight", "bias"):
            parts = [state.pop(f"layers.{i}.attention.{x}_proj.{kind}") for x in "qkv"]
            ours[f"blocks.{i}.attn.qkv.{kind}"] = torch.cat(parts)
    for old, new in keys.items():
        for kind in ("", ".weight", ".bias"):
            if old + kind in state:
                ours[new + kind] = state.pop(old + kind)
    assert not state, f"left over: {sorted(state)}"
    return ours


@torch.no_grad()
@SIZES
def test_hugging_face_classifier(img_size):
    config = small(img_size=img_size)
    theirs = hf_vit("ViTForImageClassification", config, layer_norm_eps=1e-6)
    ours = ViT(config).eval()
    ours.load_state_dict(from_hugging_face(theirs.state_dict(), config.depth), strict=True)
    x = images(config)
    assert distance(ours.encode(ours.tokens(x)), theirs.vit(x).last_hidden_state) < TOLERANCE
    assert distance(ours(x), theirs(x).logits) < TOLERANCE


@torch.no_grad()
@SIZES
def test_hugging_face_pooler_is_the_hidden_tanh_layer(img_size):
    config = small(img_size=img_size, head="tanh")
    theirs = hf_vit("ViTModel", config, layer_norm_eps=1e-6)
    head = randomise(nn.Linear(config.width, config.classes))
    ours = ViT(config).eval()
    state = theirs.state_dict() | {f"classifier.{name}": value for name, value in head.state_dict().items()}
    ours.load_state_dict(from_hugging_face(state, config.depth), strict=True)
    x = images(config)
    expected = theirs(x)
    assert distance(ours.embed(x), expected.last_hidden_state[:, 0]) < TOLERANCE
    assert distance(ours(x), head(expected.pooler_output)) < TOLERANCE
