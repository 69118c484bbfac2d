"""The Mixer's files of its authors, both ways, at any size that it was trained for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import peers
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from peers import TOLERANCE, distance, images
from torch import Tensor

from vitrail.data.preprocess import Preprocess
from vitrail.errors import UserError
from vitrail.models.mixer import MixerConfig
from vitrail.tasks import Multiclass
from vitrail.verbs.convert import convert
from vitrail.weights import Card, load, save

MIXER = MixerConfig(32, 2, 16, 128, 8, (32, 48), channels=1, classes=5)


def mixer_arrays(config: MixerConfig) -> dict[str, NDArray[np.float32]]:
    """Random arrays with the names and shapes of the authors' files."""
    width, patch = config.width, config.patch
    shapes: dict[str, tuple[int, ...]] = {
        "stem/kernel": (patch, patch, config.channels, width),
        "stem/bias": (width,),
        "head/kernel": (width, config.classes),
        "head/bias": (config.classes,),
    }
    norms = ["pre_head_layer_norm"]
    for i in range(config.depth):
        block = f"MixerBlock_{i}"
        norms += [f"{block}/LayerNorm_0", f"{block}/LayerNorm_1"]
        mixed = {"token_mixing": (config.length, config.mlp_tokens), "channel_mixing": (width, config.mlp_channels)}
        for mixing, (tokens, hidden) in mixed.items():
            shapes |= {
                f"{block}/{mixing}/Dense_0/kernel": (tokens, hidden),
                f"{block}/{mixing}/Dense_0/bias": (hidden,),
            }
            shapes |= {
                f"{block}/{mixing}/Dense_1/kernel": (hidden, tokens),
                f"{block}/{mixing}/Dense_1/bias": (tokens,),
            }
    for norm in norms:
        shapes |= {f"{norm}/scale": (width,), f"{norm}/bias": (width,)}
    generator = np.random.default_rng(0)
    return {name: generator.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}


def mixer_forward(arrays: Mapping[str, NDArray[np.float32]], x: Tensor) -> Tensor:
    """The authors' model, written with their names: logits of images (B, C, H, W)."""
    a = {name: torch.from_numpy(value) for name, value in arrays.items()}

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], a[f"{name}/scale"], a[f"{name}/bias"], 1e-6)

    def dense(x: Tensor, name: str) -> Tensor:
        return x @ a[f"{name}/kernel"] + a[f"{name}/bias"]

    def mlp(x: Tensor, name: str) -> Tensor:
        return dense(F.gelu(dense(x, f"{name}/Dense_0"), approximate="tanh"), f"{name}/Dense_1")

    p = a["stem/kernel"].shape[0]
    b, c, h, w = x.shape
    x = x.reshape(b, c, h // p, p, w // p, p).permute(0, 2, 4, 3, 5, 1)
    x = torch.einsum("bhwpqc,pqcd->bhwd", x, a["stem/kernel"]).flatten(1, 2) + a["stem/bias"]
    for i in range(len([name for name in a if name.endswith("LayerNorm_0/scale")])):
        x = x + mlp(norm(x, f"MixerBlock_{i}/LayerNorm_0").mT, f"MixerBlock_{i}/token_mixing").mT
        x = x + mlp(norm(x, f"MixerBlock_{i}/LayerNorm_1"), f"MixerBlock_{i}/channel_mixing")
    return dense(norm(x, "pre_head_layer_norm").mean(1), "head")


@torch.no_grad()
@pytest.mark.parametrize("size", [(32, 48), (16, 16), (64, 24)])
def test_the_mixer_of_its_authors(tmp_path, size):
    """At any size that it was trained for: its weights cannot be resampled."""
    config = replace(MIXER, img_size=size)
    arrays = mixer_arrays(config)
    np.savez(tmp_path / "Mixer-B_16.npz", **arrays)
    model = load(tmp_path / "Mixer-B_16.npz", model=config)
    assert peers.shown(model.config) == config
    assert distance(model(images(config)), mixer_forward(arrays, images(config))) < TOLERANCE
    with pytest.raises(UserError, match="its image size must stay"):
        load(tmp_path / "Mixer-B_16.npz", model=config, img_size=96)
    card = Card(model="mixer", config=model.config, task=Multiclass(tuple("abcde")), preprocess=Preprocess(size, 1))
    save(tmp_path / "own.safetensors", model, card)
    back = convert(tmp_path / "own.safetensors", tmp_path / "back.npz", to="npz")
    with np.load(back) as file:
        written = dict(file)
    assert written.keys() == arrays.keys()
    assert all(np.array_equal(written[name], arrays[name]) for name in arrays)
