"""At other image sizes, too, weights give the numbers of the code they come from: positions are resampled alike."""

from __future__ import annotations

import importlib
from collections import OrderedDict
from dataclasses import replace

import numpy as np
import peers
import pytest
import torch
import torch.nn.functional as F
from peers import TOLERANCE, distance, hf_vit, jax_arrays, jax_forward, randomise, timm_vit
from scipy import ndimage
from torch import Tensor

from vitrail.models import resize
from vitrail.models.vit import ViTConfig
from vitrail.weights import load, open_run, save

CONFIG = ViTConfig(width=32, depth=2, heads=4, mlp=128, patch=4, img_size=(24, 24), classes=5)
DINOV2 = replace(CONFIG, layer_scale=1e-5)
CLIP = replace(CONFIG, stem="clip", act="quick_gelu", eps=1e-5)
SIZES = pytest.mark.parametrize("size", [(32, 32), (16, 28)], ids=["larger", "rectangle"])


def images(size):
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))


def check(source, config, size, expected):
    """Loading at another size, and resizing a loaded or a saved model, give the expected outputs."""
    model = load(source, config, img_size=size)
    assert distance(model(images(size)), expected) < TOLERANCE
    assert distance(resize(load(source, config), size)(images(size)), expected) < TOLERANCE


def resized(config, theirs, size, **how) -> Tensor:
    """The outputs of timm's model with positions resampled by plain `F.interpolate` to a size or `scale_factor`."""
    pos = theirs.pos_embed.data
    how = how or {"size": tuple(side // 4 for side in size)}
    grown = F.interpolate(pos[:, 1:].reshape(1, 6, 6, 32).permute(0, 3, 1, 2), mode="bicubic", **how).flatten(2).mT
    other = timm_vit(replace(config, img_size=size))
    other.load_state_dict(theirs.state_dict() | {"pos_embed": torch.cat([pos[:, :1], grown], dim=1)})
    return other(images(size))


@torch.no_grad()
@SIZES
@pytest.mark.parametrize(
    ("config", "options"),
    [
        (CONFIG, {}),
        (replace(CONFIG, pool="cls_dist"), {}),
        (replace(CONFIG, pool="map"), {}),
        (replace(DINOV2, registers=4), {"no_embed_class": True}),
        (CLIP, {}),
    ],
    ids=["ViT", "distilled DeiT", "map", "DINOv2 with registers", "CLIP"],
)
def test_timm(config, options, size):
    theirs = timm_vit(config, dynamic_img_size=True, **options)
    check(theirs.state_dict(), config, size, theirs(images(size)))


@torch.no_grad()
@SIZES
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("ViTForImageClassification", CONFIG),
        ("DeiTForImageClassificationWithTeacher", replace(CONFIG, pool="cls_dist")),
        ("ViTMSNForImageClassification", CONFIG),
        ("Dinov2ForImageClassification", replace(DINOV2, pool="cls_gap")),
        ("Dinov2WithRegistersForImageClassification", replace(DINOV2, pool="cls_gap", registers=3)),
    ],
    ids=["ViT", "DeiT", "MSN", "DINOv2", "DINOv2 with registers"],
)
def test_hugging_face(tmp_path, name, config, size):
    theirs = hf_vit(name, config)
    theirs.save_pretrained(tmp_path)
    how = {} if name.startswith("Dinov2") else {"interpolate_pos_encoding": True}
    check(tmp_path, None, size, theirs(images(size), **how).logits)


@torch.no_grad()
@SIZES
def test_clip_of_transformers(tmp_path, size):
    them = peers.transformers()
    about = them.CLIPVisionConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, image_size=24, patch_size=4
    )
    theirs = randomise(them.CLIPVisionModel(about))
    theirs.save_pretrained(tmp_path)
    check(tmp_path, None, size, theirs(images(size), interpolate_pos_encoding=True).pooler_output)


@torch.no_grad()
@SIZES
def test_dino_and_dinov2_of_their_authors(size):
    """Their code interpolates by scale, with 0.1 added to the size. With registers it is antialiased instead."""
    scale = tuple((side // 4 + 0.1) / 6 for side in size)
    dino = timm_vit(CONFIG)
    check({"teacher": dino.state_dict()}, CONFIG, size, resized(CONFIG, dino, size, scale_factor=scale))
    dinov2 = timm_vit(DINOV2)
    released = dinov2.state_dict() | {"mask_token": torch.zeros(1, 32)}
    check(released, DINOV2, size, resized(DINOV2, dinov2, size, scale_factor=scale))
    config = replace(DINOV2, registers=4)
    theirs = timm_vit(config, no_embed_class=True, dynamic_img_size=True)
    names = {"reg_token": "register_tokens"}
    released = {names.get(name, name): value for name, value in theirs.state_dict().items()}
    check(released | {"mask_token": torch.zeros(1, 32)}, config, size, theirs(images(size)))


@torch.no_grad()
@SIZES
def test_deit_and_mae_of_their_authors(size):
    theirs = timm_vit(CONFIG)
    check({"model": theirs.state_dict()}, CONFIG, size, resized(CONFIG, theirs, size))


@torch.no_grad()
@pytest.mark.parametrize("side", [32, 16])
def test_torchvision(side):
    peers.timm()  # makes torchvision importable
    interpolate = importlib.import_module("torchvision.models.vision_transformer").interpolate_embeddings
    theirs, other = (randomise(peers.TorchvisionViT(replace(CONFIG, img_size=(s, s)))) for s in (24, side))
    other.load_state_dict(interpolate(side, 4, OrderedDict(theirs.state_dict())))
    check(theirs.state_dict(), CONFIG, (side, side), other(images((side, side))))


@torch.no_grad()
@SIZES
def test_jax(tmp_path, size):
    arrays = jax_arrays(CONFIG)
    np.savez(tmp_path / "ViT.npz", **arrays)
    name = "Transformer/posembed_input/pos_embedding"
    grid = tuple(side // 4 for side in size)
    grown = ndimage.zoom(arrays[name][0, 1:].reshape(6, 6, 32), (grid[0] / 6, grid[1] / 6, 1), order=1)
    pos = np.concatenate([arrays[name][:, :1], grown.reshape(1, -1, 32)], axis=1)
    check(tmp_path / "ViT.npz", None, size, jax_forward(arrays | {name: pos}, images(size))[0])


@torch.no_grad()
def test_a_saved_model_keeps_the_way_of_its_source(tmp_path):
    theirs = hf_vit("ViTForImageClassification", CONFIG)
    theirs.save_pretrained(tmp_path / "theirs")
    save(tmp_path / "own.safetensors", *open_run(tmp_path / "theirs"))
    expected = theirs(images((32, 32)), interpolate_pos_encoding=True).logits
    check(tmp_path / "own.safetensors", None, (32, 32), expected)
