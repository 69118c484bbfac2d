"""Two towers: published counts, the contract, and classifiers made of words."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from vitrail.errors import UserError
from vitrail.models import build, canonical, parameters
from vitrail.models.text import TextConfig
from vitrail.models.two_tower import TwoTowerConfig, clip, siglip
from vitrail.models.vit import ViTConfig
from vitrail.models.zero_shot import ZeroShot, ZeroShotConfig

IMAGE = ViTConfig(32, 2, 4, 64, 8, (16, 16), classes=0)
TEXT = TextConfig(24, 2, 4, 48, 40, 10)
SMALL = TwoTowerConfig(IMAGE, TEXT, 16)


def tower(name: str, **changes) -> ViTConfig:
    return replace(canonical(name)[1], classes=0, **changes)


MAP = {"pool": "map", "act": "gelu_tanh"}


@pytest.mark.parametrize(
    ("config", "total", "image"),
    [
        (clip(tower("clip_b32"), 512, 512), 151_277_313, 87_849_216),
        (clip(tower("clip_b16"), 512, 512), 149_620_737, 86_192_640),
        (clip(tower("clip_l14"), 768, 768), 427_616_513, 303_966_208),
        (clip(tower("vit_s16", stem="clip"), 384, 384), 62_257_537, 21_813_504),
        (siglip(tower("vit_b16", **MAP)), 203_155_970, 92_884_224),
        (siglip(tower("vit_b16", **MAP), vocab=256_000), 375_187_970, 92_884_224),
    ],
    ids=["CLIP B/32", "CLIP B/16", "CLIP L/14", "CLIP S/16", "SigLIP B/16", "SigLIP 2 B/16"],
)
def test_published_counts(config, total, image):
    assert parameters(config) == total
    with torch.device("meta"):
        model = build(config)
    found = sum(p.numel() for part in (model.image, model.image_proj) for p in part.parameters())
    assert found == image


@pytest.mark.parametrize("config", [SMALL, clip(IMAGE, 64, 16, 40, 10), siglip(replace(IMAGE, pool="map"), 40, 10)])
def test_both_towers_end_in_one_space(config):
    model = build(config).eval()
    images, tokens = torch.randn(3, 3, 16, 16), torch.randint(0, 39, (3, 10))
    joint, texts = model(images), model.embed_text(tokens)
    assert joint.shape == texts.shape == (3, config.classes)
    assert torch.allclose(joint.norm(dim=1), torch.ones(3))
    assert torch.allclose(texts.norm(dim=1), torch.ones(3))
    logits = model.match(joint, texts)
    scale, bias = (10.0, -10.0) if config.bias else (1 / 0.07, 0.0)
    assert torch.allclose(logits, scale * joint @ texts.T + bias, atol=1e-4)


def test_every_parameter_is_in_one_stage_that_is_called():
    model = build(SMALL)
    seen, called = [], set()
    for stage in model.stages():
        seen += [id(p) for p in stage.parameters()]
        stage.register_forward_hook(lambda stage, *_: called.add(id(stage)))
    assert sorted(seen) == sorted(id(p) for p in model.parameters())
    model(torch.randn(1, 3, 16, 16))
    model.embed_text(torch.tensor([[38, 1, 39]]))
    assert called == {id(stage) for stage in model.stages()}


def test_a_causal_tower_reads_no_padding():
    model = build(SMALL).eval()
    text = torch.tensor([[38, 5, 6, 39]])
    padded = F.pad(text, (0, 6))
    assert torch.allclose(model.embed_text(text), model.embed_text(padded), atol=1e-6)
    other = padded.clone()
    other[0, 6] = 7  # behind the end
    assert torch.allclose(model.embed_text(other), model.embed_text(padded), atol=1e-6)
    other[0, 2] = 7
    assert not torch.allclose(model.embed_text(other), model.embed_text(padded), atol=1e-4)


def test_siglips_tower_reads_all_positions():
    model = build(siglip(replace(IMAGE, pool="map"), 40, 10)).eval()
    text = torch.randint(0, 40, (1, 10))
    for position in (0, 9):
        other = text.clone()
        other[0, position] = (other[0, position] + 1) % 40
        assert not torch.allclose(model.embed_text(other), model.embed_text(text), atol=1e-5)
    with pytest.raises(UserError, match="exactly 10 tokens, but got 4"):
        model.embed_text(text[:, :4])


def test_a_classifier_of_words_is_the_match_with_its_texts():
    model = build(SMALL).eval()
    images, texts = torch.randn(2, 3, 16, 16), F.normalize(torch.randn(5, 16), dim=1)
    classifier = ZeroShot.of(model, texts)
    assert torch.allclose(classifier(images), model.match(model(images), texts), atol=1e-5)
    assert sum(p.numel() for p in classifier.parameters()) == parameters(classifier.config)
    assert ZeroShotConfig.from_plain(classifier.config.to_plain()) == classifier.config


def test_the_configuration_round_trips_and_follows_the_image_size():
    assert TwoTowerConfig.from_plain(SMALL.to_plain()) == SMALL
    larger = replace(SMALL, img_size=(32, 24), drop_path=0.1)
    assert (larger.image.img_size, larger.grid, larger.image.drop_path) == ((32, 24), (4, 3), 0.1)


@pytest.mark.parametrize("change", [{"bias": None}, {"classes": "16"}, {"img_size": "large"}])
def test_a_card_with_other_types_is_refused(change):
    with pytest.raises(UserError, match=f"'{next(iter(change))}' must be"):
        TwoTowerConfig.from_plain(SMALL.to_plain() | change)


def test_towers_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match="the tower's 32 features, but 'classes' is 16"):
        replace(SMALL, project=False)
    with pytest.raises(UserError, match="must be causal"):
        replace(TEXT, causal=False)


@pytest.mark.parametrize("change", [{"depth": 10**6}, {"length": 10**9}, {"vocab": 10**12}, {"width": 0}], ids=str)
def test_sizes_that_no_text_tower_has_are_refused(change):
    with pytest.raises(UserError, match=f"'{next(iter(change))}' of the text tower must be from 1 to "):
        replace(TEXT, **change)


def test_a_joint_space_that_no_model_has_is_refused():
    for config in (SMALL, ZeroShotConfig(IMAGE, joint=16, classes=3)):
        with pytest.raises(UserError, match="'classes' must be at most 16,777,216"):
            replace(config, classes=2**62)
