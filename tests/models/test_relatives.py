"""The ViT's relatives: published counts to the last parameter, and the same numbers as timm from the same weights."""

from __future__ import annotations

from typing import Any

import peers
import pytest
import torch
from peers import distance, randomise
from torch import nn

from vitrail import models
from vitrail.errors import UserError
from vitrail.models import ModelConfig
from vitrail.models.mixer import MixerConfig

TOLERANCE = 1e-5

# 1000 classes, at the native size: parameters as timm and the authors count them, multiply-accumulates in billions.
PUBLISHED = {
    "mixer_s32": (19_104_624, 1.00),
    "mixer_s16": (18_528_264, 3.79),
    "mixer_b32": (60_293_428, 3.24),
    "mixer_b16": (59_880_472, 12.62),
    "mixer_l32": (206_939_264, 11.27),
    "mixer_l16": (208_196_168, 44.60),
    "mixer_h14": (432_350_952, None),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_are_the_published_ones(name):
    count, gmacs = PUBLISHED[name]
    assert models.parameters(models.CONFIGS[name]) == count
    if gmacs is not None:
        assert models.macs(models.CONFIGS[name]) == pytest.approx(gmacs * 1e9, rel=0.01, abs=5e6)


def test_small_siblings_are_small():
    small = {name: models.CONFIGS[name] for name in models.CONFIGS if name.endswith("_nano")}
    assert set(small) == {f"{family}_nano" for family in models.FAMILIES if family != "vit"}
    for config in small.values():
        assert models.parameters(config) < 1_300_000
        assert models.macs(config) < 80e6
        assert max(config.img_size) <= 64


@torch.no_grad()
def agree(config: ModelConfig, theirs: nn.Module) -> None:
    """Our model takes their weights by name, and gives their logits and the features that their head reads."""
    theirs = randomise(theirs)
    ours = models.build(config).eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = torch.randn(2, config.channels, *config.img_size, generator=torch.Generator().manual_seed(1))
    features = theirs.forward_head(theirs.forward_features(x), pre_logits=True)
    assert distance(ours.embed(x), features) < TOLERANCE
    assert distance(ours(x), theirs(x)) < TOLERANCE


def timm(module: str, name: str, **options: Any) -> nn.Module:
    return getattr(peers.timm(f"timm.models.{module}"), name)(**options)


@pytest.mark.parametrize("img_size", [(32, 32), (32, 48)], ids=str)
def test_mixer_is_timms(img_size):
    config = MixerConfig(64, 3, 32, 256, 8, img_size, channels=1, classes=10)
    theirs = timm(
        "mlp_mixer", "MlpMixer", img_size=img_size, patch_size=8, num_blocks=3, embed_dim=64, in_chans=1, num_classes=10
    )
    agree(config, theirs)


SPELLINGS = [
    ("mixer_b16_224", "mixer_b16", 224),
    ("mixer_b16_224.goog_in21k_ft_in1k", "mixer_b16", 224),
    ("timm/mixer_l16_224.goog_in21k", "mixer_l16", 224),
    ("Mixer-B/16", "mixer_b16", 224),
    ("Mixer-L_16", "mixer_l16", 224),
    ("Mixer-S/32", "mixer_s32", 224),
    ("mixer_nano", "mixer_nano", 32),
]


@pytest.mark.parametrize(("spelling", "name", "side"), SPELLINGS, ids=[row[0] for row in SPELLINGS])
def test_every_spelling_is_understood(spelling, name, side):
    found, config = models.canonical(spelling)
    assert found == name == models.name_of(config)
    assert config.img_size == (side, side)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mixer_b16", {"img_size": 230}, "multiple of the patch size, 16, but it is 230x230. .*is 224x224"),
        ("mixer_b16", {"mlp_tokens": 0}, "'mlp_tokens' must be at least 1, but it is 0"),
        ("mixer_b16", {"classes": 0}, "'classes' must be at least 1, but it is 0"),
        ("mixer_b16", {"drop": 1.0}, "'drop' must be at least 0 and below 1, but it is 1.0"),
        ("mixer_b16", {"heads": 3}, "A model has no option 'heads'. .*It takes width, depth"),
    ],
    ids=str,
)
def test_options_that_cannot_be_are_refused(name, changes, message):
    with pytest.raises(UserError, match=message):
        models.configure(name, **changes)
