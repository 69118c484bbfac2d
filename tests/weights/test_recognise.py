"""What is recognised in weights of others, what is adapted and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import peers
import pytest
import torch
from peers import jax_arrays, timm_vit

import vitrail
from vitrail.errors import UserError
from vitrail.models import build, canonical, configure
from vitrail.models.vit import ViTConfig
from vitrail.tasks import Multiclass
from vitrail.weights import load, recognise, start_from
from vitrail.weights.formats import vit
from vitrail.weights.tensors import from_state_dict

CONFIG = ViTConfig(width=32, depth=2, heads=4, mlp=128, patch=4, img_size=(24, 24), classes=5)
TIMM = [
    *(f"vit_{size}_patch16_224" for size in ("tiny", "small", "base", "large")),
    "vit_huge_patch14_224",
    *(f"deit_{size}_patch16_224" for size in ("tiny", "small", "base")),
    *(f"deit_{size}_distilled_patch16_224" for size in ("tiny", "small", "base")),
    *(f"vit_{size}_patch14_dinov2" for size in ("small", "base", "large", "giant")),
    *(f"vit_{size}_patch14_reg4_dinov2" for size in ("small", "base", "large", "giant")),
]


@pytest.mark.parametrize("name", TIMM)
def test_timms_models_are_known_by_their_shapes_as_by_their_names(name):
    with torch.device("meta"):
        theirs = peers.timm().create_model(name)
    weights = recognise.recognise(from_state_dict(theirs.state_dict(), "it"), "it")
    config = recognise.architecture(weights, recognise.Sidecar(), None)
    _, expected = canonical(name)
    assert config == replace(expected, classes=theirs.num_classes)  # DINOv2 has no head
    with torch.device("meta"):
        shapes = {n: v.shape for n, v in build(config).state_dict().items()}
    found = {n: v.shape for n, v in weights.shapes(config).items()}
    assert {n: s for n, s in shapes.items() if n in found or not n.startswith("head.")} == found


@pytest.mark.parametrize("format", vit.FORMATS)
def test_a_b16_of_full_size_is_known_in_every_format(format):
    config = configure("vit_b16")
    with torch.device("meta"):
        state = build(config).state_dict()
    weights = recognise.recognise(from_state_dict(vit.FORMATS[format].write(state, config), "it"), "it")
    assert weights.format == format
    sidecar = recognise.read_sidecar(weights, None)
    assert peers.shown(recognise.architecture(weights, sidecar, None)) == config
    assert {n: v.shape for n, v in weights.shapes(config).items()} == {n: v.shape for n, v in state.items()}


def test_all_that_is_adapted_is_logged(caplog):
    state = timm_vit(CONFIG).half().state_dict()
    with caplog.at_level("INFO", "vitrail"):
        model = vitrail.load(state, CONFIG, classes=3, img_size=(16, 32), channels=1)
    assert model.config == replace(CONFIG, classes=3, img_size=(16, 32), channels=1)
    text = "\n".join(record.message for record in caplog.records)
    for part in (
        "timm weights of a vit_w32d2p4 at 24x24",
        "mean 0.5, std 0.5, crop 0.9, bicubic resizing: assumed as usual",
        "new head for 3 classes",
        "position embeddings resampled from 6x6 to 4x8 patches (bicubic)",
        "patch filters adapted from 3 to 1 channels",
        "converted from float16 to float32",
    ):
        assert f"From The state dict: {part}" in text


def test_training_starts_from_foreign_weights(tmp_path):
    np.savez(tmp_path / "ViT.npz", **jax_arrays(replace(CONFIG, head="tanh")))
    model = build(replace(CONFIG, head="tanh", classes=2))
    notes = start_from(tmp_path / "ViT.npz", model, Multiclass(("cat", "dog")))
    assert "new head for 2 classes" in notes
    expected = load(tmp_path / "ViT.npz")
    assert torch.equal(model.blocks[1].attn.qkv.weight, expected.blocks[1].attn.qkv.weight)


def test_a_model_shares_nothing_with_the_one_its_weights_come_from():
    theirs = timm_vit(CONFIG)
    model = load(theirs.state_dict(), CONFIG)
    before = theirs.norm.weight.clone()
    with torch.no_grad():
        model.norm.weight.zero_()
    assert torch.equal(theirs.norm.weight, before)


def test_another_model_than_the_one_asked_for_is_refused():
    state = timm_vit(CONFIG).state_dict()
    with pytest.raises(UserError, match="has width 32, but `model` has 768"):
        load(state, "vit_b16")
    with pytest.raises(UserError, match="has depth 2, but `model` has 3"):
        load(state, replace(CONFIG, depth=3))


def test_positions_of_no_square_need_to_be_told():
    state = timm_vit(replace(CONFIG, img_size=(16, 32))).state_dict()
    with pytest.raises(UserError, match="33 positions, which fit no square image"):
        load(state, CONFIG)
    assert load(state, replace(CONFIG, img_size=(16, 32))).config.img_size == (16, 32)


def test_the_table_of_what_does_not_fit():
    state = timm_vit(CONFIG).state_dict()
    del state["blocks.1.norm2.weight"]
    state["adapter.weight"] = torch.zeros(32)
    state["blocks.0.mlp.fc2.weight"] = torch.zeros(32, 64)
    with pytest.raises(UserError) as caught:
        load(state, CONFIG)
    assert str(caught.value).splitlines()[1:] == [
        "  missing     blocks.1.norm2.weight (32,)",
        "  unexpected  adapter.weight (32,)",
        "  reshaped    blocks.0.mlp.fc2.weight (32, 64), not (32, 128)",
        "Load the tensors that fit with --partial, in Python partial=True.",
    ]
