"""Weights of the ViT's relatives that cannot be read, and models that a format has no place for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from vitrail import models
from vitrail.data.preprocess import Preprocess
from vitrail.errors import UserError
from vitrail.models.coatnet import CoAtNetConfig
from vitrail.models.mixer import MixerConfig
from vitrail.models.swin import SwinConfig
from vitrail.tasks import Multiclass
from vitrail.verbs.convert import convert
from vitrail.weights import Card, load, open_run, save

SWIN = SwinConfig((32, 64), (2, 2), (2, 4), 4, 2, (32, 48), channels=1, classes=5)
MIXER = MixerConfig(32, 2, 16, 128, 8, (32, 48), channels=1, classes=5)
COATNET = CoAtNetConfig((32, 64, 96), (1, 2, 1), 16, 1, True, (32, 48), channels=1, classes=5)
NAMES = tuple(f"class {i}" for i in range(5))


def keep(model, path):
    """Our model as a file with its card."""
    config = model.config
    seen = Preprocess(config.img_size, config.channels, 0.9, (0.4,), (0.2,))
    save(path, model, Card(model=models.name_of(config), config=config, task=Multiclass(NAMES), preprocess=seen))
    return path


@pytest.mark.parametrize(
    ("config", "model", "message"),
    [
        (SWIN, "vit_b16", "The state dict is a Swin, but `model` is vit_b16"),
        (SWIN, "swin_t", r"has widths \(32, 64\), but `model` has \(96, 192, 384, 768\)"),
        (SWIN, replace(SWIN, window=8), "has window 4, but `model` has 8"),
        (replace(MIXER, img_size=(32, 32)), "mixer_b16", "has width 32, but `model` has 768"),
        (MIXER, None, "mixes 24 tokens, which fit no square image. Give `model` with its image size"),
        (replace(COATNET, img_size=(32, 32)), "coatnet_0", r"has widths \(32, 64, 96\), but `model` has"),
        (COATNET, None, "biases for 77 offsets, which fit no square image"),
    ],
    ids=str,
)
def test_another_model_than_the_one_that_is_asked_for(config, model, message):
    with torch.device("meta"):
        state = models.build(config).state_dict()
    with pytest.raises(UserError, match=message):
        load(state, model=model)


@pytest.mark.parametrize(
    ("config", "name", "shape", "message"),
    [
        (SWIN, "patch_embed.proj.weight", (32, 1, 2, 3), "patches of 2x3 pixels, but vitrail's are square"),
        (SWIN, "patch_embed.proj.weight", (32, 2), r"is not a Swin: patch_embed.proj.weight is \(32, 2\), but it must"),
        (SWIN, "layers.1.blocks.0.attn.relative_position_bias_table", (48, 4), "48 position biases in stage 2"),
        (
            SWIN,
            "layers.1.blocks.0.attn.relative_position_bias_table",
            (49, 3),
            "is not a Swin that vitrail can build: The",
        ),
        (MIXER, "stem.proj.weight", (32, 1, 8, 4), "patches of 8x4 pixels"),
        (MIXER, "blocks.0.mlp_channels.fc1.weight", (7,), "is not a Mixer: blocks.0.mlp_channels.fc1.weight"),
        (COATNET, "layers.2.blocks.0.attn.proj.weight", (90, 96, 1, 1), "must be multiples of 32, but one is 90"),
        (COATNET, "stem.conv2.weight", (0, 1, 1, 1), "is not a CoAtNet: stem.conv2.weight"),
    ],
)
def test_shapes_of_no_model(config, name, shape, message):
    with torch.device("meta"):
        state = models.build(config).state_dict() | {name: torch.empty(shape)}
    with pytest.raises(UserError, match=message):
        load(state, model=config)


@pytest.mark.parametrize(
    ("config", "to", "message"),
    [
        (SWIN, "torchvision", "A swin can be written for vitrail, hf or timm, but not for torchvision"),
        (replace(SWIN, img_size=(8, 8)), "timm", "a map of 2x2 in windows of 4, which timm does not support"),
        (replace(SWIN, img_size=(16, 48)), "hf", "a map of 4x12 in windows of 4, which hf does not support"),
        (replace(SWIN, img_size=(28, 44)), "hf", "a map of 14x22 in windows of 4"),
        (replace(SWIN, widths=(32, 48)), "hf", r"the widths \(32, 48\), which do not double"),
        (MIXER, "hf", "A mixer can be written for vitrail, timm or npz, but not for hf"),
        (replace(COATNET, shrink=False), "timm", "a stem without downsampling"),
        (replace(COATNET, img_size=(40, 40)), "timm", "images of 40x40, not multiples of 16"),
    ],
    ids=str,
)
def test_what_a_format_has_no_place_for_is_refused(tmp_path, config, to, message):
    path = keep(models.build(config), tmp_path / "own.safetensors")
    with pytest.raises(UserError, match=message):
        convert(path, tmp_path / ("there" if to == "hf" else "there.safetensors"), to=to)
    assert not (tmp_path / "there").exists()


def test_a_card_of_another_family_is_refused(tmp_path):
    path = keep(models.build(SWIN), tmp_path / "own.safetensors")
    save_file(models.build(MIXER).state_dict(), path)
    with pytest.raises(UserError, match=r"does not fit the architecture in its own\.json: it is a Mixer"):
        open_run(path)


def test_a_merge_of_tokens_alone_is_no_swin():
    state = {"patch_embed.proj.weight": (32, 1, 2, 2), "layers.0.downsample.reduction.weight": (64, 128)}
    with pytest.raises(UserError, match=r"is not a complete Swin: layers\.0\.blocks\.0\.attn.* is missing"):
        load({name: torch.zeros(shape) for name, shape in state.items()})
