"""Files of big_vision: fixed positions, attention pooling, stacked blocks and old names, read and written.

The reference below is their forward pass on their arrays. It agrees with flax's own modules within 1e-6.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import peers
import pytest
import torch
import torch.nn.functional as F
from peers import TOLERANCE, distance, images
from scipy import ndimage
from torch import Tensor

from vitrail.models import create
from vitrail.models.packed import pack
from vitrail.models.position import sincos2d
from vitrail.models.vit import ViTConfig
from vitrail.verbs.convert import convert
from vitrail.weights import load, open_card, open_run

CONFIG = ViTConfig(32, 2, 4, 64, 4, (24, 24), classes=5, pool="gap", head="tanh", act="gelu_tanh", resample="linear")
VARIANTS = {
    "learned": CONFIG,
    "sincos2d": replace(CONFIG, pos="sincos2d"),
    "map": replace(CONFIG, pool="map", head="linear"),
    "tok": replace(CONFIG, pool="cls", head="linear"),
    "tok, sincos2d": replace(CONFIG, pool="cls", pos="sincos2d"),
    "map, sincos2d": replace(CONFIG, pool="map", pos="sincos2d"),
}
VARIANT = pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())


def arrays_of(config):
    """Random arrays with the names and shapes of big_vision."""
    d, m, h, p = config.width, config.mlp, config.heads, config.patch

    def attention(name):
        parts = {f"{name}/{part}/kernel": (d, h, d // h) for part in ("query", "key", "value")}
        parts |= {f"{name}/{part}/bias": (h, d // h) for part in ("query", "key", "value")}
        return parts | {f"{name}/out/kernel": (h, d // h, d), f"{name}/out/bias": (d,)}

    def mlp(name):
        dense = {f"{name}/Dense_0/kernel": (d, m), f"{name}/Dense_0/bias": (m,)}
        return dense | {f"{name}/Dense_1/kernel": (m, d), f"{name}/Dense_1/bias": (d,)}

    def norm(name):
        return {f"{name}/scale": (d,), f"{name}/bias": (d,)}

    shapes = {"embedding/kernel": (p, p, 3, d), "embedding/bias": (d,), **norm("Transformer/encoder_norm")}
    shapes |= {"head/kernel": (d, config.classes), "head/bias": (config.classes,)}
    shapes |= {"pos_embedding": (1, 36, d)} if config.pos == "learned" else {}
    shapes |= {"cls": (1, 1, d)} if config.pool == "cls" else {}
    shapes |= {"pre_logits/kernel": (d, d), "pre_logits/bias": (d,)} if config.head == "tanh" else {}
    if config.pool == "map":
        shapes |= {"MAPHead_0/probe": (1, 1, d), **attention("MAPHead_0/MultiHeadDotProductAttention_0")}
        shapes |= norm("MAPHead_0/LayerNorm_0") | mlp("MAPHead_0/MlpBlock_0")
    for i in range(config.depth):
        block = f"Transformer/encoderblock_{i}"
        shapes |= norm(f"{block}/LayerNorm_0") | norm(f"{block}/LayerNorm_1") | mlp(f"{block}/MlpBlock_0")
        shapes |= attention(f"{block}/MultiHeadDotProductAttention_0")
    random = np.random.default_rng(0)
    return {name: random.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}


def forward(arrays, x: Tensor, config) -> Tensor:
    """The logits of big_vision's model."""
    a = {name: torch.from_numpy(value) for name, value in arrays.items()}

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], a[f"{name}/scale"], a[f"{name}/bias"], 1e-6)

    def dense(x, name):
        return x @ a[f"{name}/kernel"] + a[f"{name}/bias"]

    def mlp(x, name):
        return dense(F.gelu(dense(x, f"{name}/Dense_0"), approximate="tanh"), f"{name}/Dense_1")

    def attention(queries, x, name):
        q, k, v = (
            torch.einsum("bnd,dhe->bnhe", y, a[f"{name}/{part}/kernel"]) + a[f"{name}/{part}/bias"]
            for part, y in (("query", queries), ("key", x), ("value", x))
        )
        weights = (torch.einsum("bnhe,bmhe->bhnm", q, k) / q.shape[-1] ** 0.5).softmax(-1)
        y = torch.einsum("bhnm,bmhe->bnhe", weights, v)
        return torch.einsum("bnhe,hed->bnd", y, a[f"{name}/out/kernel"]) + a[f"{name}/out/bias"]

    b, p = len(x), config.patch
    grid = (x.shape[2] // p, x.shape[3] // p)
    cut = x.reshape(b, 3, grid[0], p, grid[1], p).permute(0, 2, 4, 3, 5, 1)
    x = torch.einsum("bhwpqc,pqcd->bhwd", cut, a["embedding/kernel"]).flatten(1, 2) + a["embedding/bias"]
    x = x + (a["pos_embedding"] if "pos_embedding" in a else sincos2d(grid, config.width))
    x = torch.cat([a["cls"].expand(b, -1, -1), x], dim=1) if "cls" in a else x
    for i in range(config.depth):
        block = f"Transformer/encoderblock_{i}"
        y = norm(x, f"{block}/LayerNorm_0")
        x = x + attention(y, y, f"{block}/MultiHeadDotProductAttention_0")
        x = x + mlp(norm(x, f"{block}/LayerNorm_1"), f"{block}/MlpBlock_0")
    x = norm(x, "Transformer/encoder_norm")
    if config.pool == "map":
        y = attention(a["MAPHead_0/probe"].expand(b, -1, -1), x, "MAPHead_0/MultiHeadDotProductAttention_0")
        x = (y + mlp(norm(y, "MAPHead_0/LayerNorm_0"), "MAPHead_0/MlpBlock_0"))[:, 0]
    else:
        x = x[:, 0] if "cls" in a else x.mean(1)
    x = torch.tanh(dense(x, "pre_logits")) if "pre_logits/kernel" in a else x
    return dense(x, "head")


def stacked(arrays):
    """The layout of `scan=True`: one array for all blocks."""
    first, old = "Transformer/encoderblock_0/", {n: v for n, v in arrays.items() if "encoderblock_" not in n}
    names = [name.removeprefix(first) for name in arrays if name.startswith(first)]
    scanned = {n: np.stack([arrays[f"Transformer/encoderblock_{i}/{n}"] for i in range(2)]) for n in names}
    return old | {f"Transformer/encoderblock/{name}": value for name, value in scanned.items()}


def old_names(arrays):
    """Positions as before 2022, and the pool of ViT-G's development."""
    return {
        f"Transformer/{name}" if name == "pos_embedding" else name.removeprefix("MAPHead_0/"): value
        for name, value in arrays.items()
    }


def two_towers(arrays):
    """The image tower beside a text tower, as in SigLIP."""
    text = {"params/txt/Embed_0/embedding": np.zeros((9, 8), np.float32), "params/t": np.zeros(1, np.float32)}
    return {f"params/img/{name}": value for name, value in arrays.items()} | text


@torch.no_grad()
@VARIANT
@pytest.mark.parametrize("layout", [dict, stacked, old_names, two_towers])
def test_every_layout_is_read(tmp_path, config, layout):
    arrays = arrays_of(config)
    np.savez(tmp_path / "it.npz", **layout(arrays))
    hint = replace(config, resample="bicubic", act="gelu") if config.pos == "sincos2d" else None  # says the size
    model, card = open_run(tmp_path / "it.npz", model=hint)
    assert card.config == config
    expected = forward(arrays, images(config), config)
    assert distance(model(images(config)), expected) < TOLERANCE
    assert distance(pack(model)(images(config)), expected) < TOLERANCE


@torch.no_grad()
@VARIANT
@pytest.mark.parametrize("size", [(32, 32), (16, 28)], ids=["larger", "rectangle"])
def test_other_sizes_are_those_of_big_vision(tmp_path, config, size):
    """Learned positions are resampled by `scipy.ndimage.zoom`; fixed ones are computed for the new grid."""
    arrays = arrays_of(config)
    np.savez(tmp_path / "it.npz", **arrays)
    model = load(tmp_path / "it.npz", model=config if config.pos == "sincos2d" else None, img_size=size)
    if config.pos == "learned":
        pos = arrays["pos_embedding"].reshape(6, 6, 32)
        grown = ndimage.zoom(pos, (size[0] / 24, size[1] / 24, 1), order=1)
        arrays["pos_embedding"] = grown.reshape(1, -1, 32)
    x = images(model.config)
    assert distance(model(x), forward(arrays, x, config)) < TOLERANCE


@torch.no_grad()
@VARIANT
@pytest.mark.parametrize("to", ["npz", "big_vision"])
def test_every_variant_is_written(tmp_path, config, to):
    arrays = arrays_of(config)
    np.savez(tmp_path / "it.npz", **arrays)
    hint = config if config.pos == "sincos2d" else None
    with np.load(convert(tmp_path / "it.npz", tmp_path / "back.npz", to=to, model=hint)) as file:
        back = dict(file)
    if to == "big_vision":
        assert back.keys() == stacked(arrays).keys()
        assert all(np.array_equal(back[name], value) for name, value in stacked(arrays).items())
    elif config.pool == "map" or config.pos == "sincos2d":
        assert back.keys() == arrays.keys()
        assert all(np.array_equal(back[name], value) for name, value in arrays.items())
    (tmp_path / "back.json").unlink()  # their own names and shapes say as much
    again = load(tmp_path / "back.npz", model=hint)
    assert distance(again(images(config)), forward(arrays, images(config), config)) < TOLERANCE


def test_a_positionless_file_has_the_published_size(tmp_path):
    config = replace(VARIANTS["sincos2d"], width=32)
    np.savez(tmp_path / "vit_s16_i1k_90ep.npz", **arrays_of(config))
    assert open_card(tmp_path / "vit_s16_i1k_90ep.npz").config == replace(config, img_size=(224, 224))


def test_a_class_tokens_position_is_added_to_it(tmp_path):
    """big_vision has none; ViT-B_16.npz does."""
    config = replace(CONFIG, pool="cls", head="linear")
    np.savez(tmp_path / "it.npz", **peers.jax_arrays(config))
    written = convert(tmp_path / "it.npz", tmp_path / "back.npz", to="big_vision")
    (tmp_path / "back.json").unlink()
    x = images(config)
    with torch.no_grad():
        assert distance(load(written)(x), load(tmp_path / "it.npz")(x)) < TOLERANCE


@torch.no_grad()
def test_the_forms_of_gelu_differ():
    """So that parity above shows that each is where it belongs."""
    x = images(CONFIG)
    exact = create("vit_nano8", img_size=24, classes=5)
    for act in ("gelu_tanh", "quick_gelu"):
        other = create("vit_nano8", img_size=24, classes=5, act=act)
        other.load_state_dict(exact.state_dict())
        assert not torch.equal(other.embed(x), exact.embed(x))
