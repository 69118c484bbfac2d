"""Trained models as the beginning of other models."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from peers import randomise
from saved import CLASSES, CONFIG, card_of, images

from vitrail import models
from vitrail.data.preprocess import Preprocess
from vitrail.errors import UserError
from vitrail.models import build
from vitrail.tasks import Multiclass
from vitrail.weights import load, save, start_from


def body_of(state):
    return {name: value for name, value in state.items() if not name.startswith("head.")}


def test_the_same_model_starts_as_it_was(path, model):
    fresh = build(CONFIG)
    assert start_from(path, fresh, Multiclass(CLASSES)) == []
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in fresh.state_dict().items())


@pytest.mark.parametrize("classes", [("cat", "dog"), ("猫/鳥", "Hündin", "cat"), ("x", "y", "z")])
def test_other_classes_get_a_new_head_and_keep_the_body(path, model, classes):
    fresh = build(replace(CONFIG, classes=len(classes)))
    assert start_from(path, fresh, Multiclass(classes)) == [f"new head for {len(classes)} classes"]
    old = body_of(model.state_dict())
    assert all(torch.equal(value, old[name]) for name, value in body_of(fresh.state_dict()).items())
    assert not fresh.head.weight.any()


@torch.no_grad()
def test_a_new_head_may_read_more_than_the_old_one(path, model):
    wider = build(replace(CONFIG, classes=5, pool="cls_gap"))
    start_from(path, wider, Multiclass(tuple("abcde")))
    assert wider.head.weight.shape == (5, 2 * CONFIG.width)
    torch.testing.assert_close(wider.embed(images())[:, : CONFIG.width], model.embed(images()))


@torch.no_grad()
def test_another_size_resamples_the_positions(path, model):
    fresh = build(replace(CONFIG, img_size=(16, 16)))
    assert start_from(path, fresh, Multiclass(CLASSES)) == [
        "position embeddings resampled from 4x6 to 8x8 patches (bicubic)"
    ]
    assert torch.isfinite(fresh(images(fresh.config))).all()
    assert torch.equal(fresh.pos_embed[:, :1], model.pos_embed[:, :1])  # the class token's row
    assert torch.equal(fresh.blocks[1].attn.qkv.weight, model.blocks[1].attn.qkv.weight)


@pytest.mark.parametrize("method", ["bilinear", "linear"])
def test_the_way_of_resampling_can_be_chosen(path, model, method, caplog):
    expected = models.resize(model, (16, 16), method)
    assert not torch.equal(expected.pos_embed, models.resize(model, (16, 16)).pos_embed)
    fresh = build(replace(CONFIG, img_size=(16, 16)))
    note = f"position embeddings resampled from 4x6 to 8x8 patches ({method})"
    assert start_from(path, fresh, Multiclass(CLASSES), resample=method) == [note]
    assert torch.equal(fresh.pos_embed, expected.pos_embed)
    with caplog.at_level("INFO"):
        loaded = load(path, img_size=16, resample=method)
    assert torch.equal(loaded.pos_embed, expected.pos_embed)
    assert note in caplog.text
    with pytest.raises(UserError, match=r"one of bicubic, .*linear, but it is 'nearest'"):
        load(path, resample="nearest")


@pytest.mark.parametrize("stem", ["patch", "conv"])
@pytest.mark.parametrize(("old", "new"), [(3, 1), (1, 3)])
@torch.no_grad()
def test_other_channels_answer_alike_to_a_grey_picture(tmp_path, stem, old, new):
    before = randomise(build(replace(CONFIG, channels=old, stem=stem)))
    save(tmp_path / "m.safetensors", before, card_of(before.config, preprocess=Preprocess((8, 12), old)))
    after = build(replace(CONFIG, channels=new, stem=stem)).eval()
    assert start_from(tmp_path / "m.safetensors", after, Multiclass(CLASSES)) == [
        f"patch filters adapted from {old} to {new} channels"
    ]
    grey = images(replace(CONFIG, channels=1))
    ours, theirs = after(grey.expand(-1, new, -1, -1)), before(grey.expand(-1, old, -1, -1))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert theirs.std() > 0.01


def test_all_that_is_adapted_is_said(path):
    fresh = build(replace(CONFIG, img_size=(8, 8), channels=1, classes=2))
    assert len(start_from(path, fresh, Multiclass(("a", "b")))) == 3


@pytest.mark.parametrize("change", [{"width": 32}, {"depth": 3}, {"pool": "gap"}, {"registers": 0}, {"head": "tanh"}])
def test_another_body_is_refused_and_nothing_is_loaded(path, change):
    fresh = build(replace(CONFIG, **change))
    before = {name: value.clone() for name, value in fresh.state_dict().items()}
    with pytest.raises(UserError, match=r"are a vit_nano2 with other options than the(.|\n)*--partial"):
        start_from(path, fresh, Multiclass(CLASSES))
    assert all(torch.equal(value, before[name]) for name, value in fresh.state_dict().items())
