"""A part of some weights is taken only if that is asked for, and is told apart from the rest in a table."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from peers import randomise
from safetensors.torch import save_file
from saved import CLASSES, CONFIG, images

import vitrail
from vitrail.data.preprocess import Preprocess
from vitrail.errors import UserError
from vitrail.models import build
from vitrail.tasks import Multiclass
from vitrail.weights import Card, load, save, start_from


def card_of(config=CONFIG, preprocess=None):
    seen = preprocess or Preprocess(config.img_size, config.channels)
    return Card(model="vit_nano2", config=config, task=Multiclass(CLASSES), preprocess=seen)


@pytest.fixture
def path(tmp_path, model):
    save(tmp_path / "model.safetensors", model, card_of())
    return tmp_path / "model.safetensors"


def broken(state):
    """A tensor too few, one too many, and one of another shape."""
    state = {name: value.clone() for name, value in state.items()}
    del state["blocks.1.norm2.weight"]
    return state | {"adapter.weight": torch.zeros(16), "blocks.0.mlp.fc2.weight": torch.zeros(16, 8)}


TABLE = """only part of it fits:
  missing     blocks.1.norm2.weight (16,)
  unexpected  adapter.weight (16,)
  reshaped    blocks.0.mlp.fc2.weight (16, 8), not (16, 32)
Missing tensors are initialised; unexpected and reshaped ones are skipped"""


def same_but(new, old, *names):
    assert new.keys() == old.keys()
    return {name for name in old if not torch.equal(new[name], old[name])} == set(names)


@pytest.mark.parametrize("own", [True, False], ids=["with its card", "without"])
def test_what_fits_is_taken_if_that_is_asked_for(tmp_path, own, caplog):
    config = replace(CONFIG, img_size=(8, 8))
    model, path = randomise(build(config)), tmp_path / "model.safetensors"
    save(path, model, card_of(config))
    save_file(broken(model.state_dict()), path)
    if not own:
        path.with_suffix(".json").unlink()
    hint = None if own else config
    with pytest.raises(UserError, match=r"unexpected  adapter\.weight \(16,\)(.|\n)*with --partial, in Python"):
        load(path, hint)
    with caplog.at_level("INFO"):
        loaded = load(path, hint, partial=True)
    assert TABLE in caplog.text
    old = model.state_dict()
    assert same_but(loaded.state_dict(), old, "blocks.1.norm2.weight", "blocks.0.mlp.fc2.weight")
    assert (loaded.blocks[1].norm2.weight == 1).all()  # as it begins
    assert not any(value.is_meta for value in loaded.state_dict().values())

    fresh = build(config)
    before = {name: value.clone() for name, value in fresh.state_dict().items()}
    assert start_from(path, fresh, Multiclass(CLASSES if own else ("0", "1", "2")), partial=True)[-1] == TABLE
    assert same_but(fresh.state_dict(), old, "blocks.1.norm2.weight", "blocks.0.mlp.fc2.weight")
    assert torch.equal(fresh.blocks[0].mlp.fc2.weight, before["blocks.0.mlp.fc2.weight"])

    out = vitrail.convert(path, path.parent / "out.safetensors", model=hint, partial=True)
    assert same_but(load(out).state_dict(), old, "blocks.1.norm2.weight", "blocks.0.mlp.fc2.weight")


def test_whole_weights_are_not_called_a_part(path, caplog):
    with caplog.at_level("INFO"):
        load(path, partial=True)
    assert not caplog.text
    assert start_from(path, build(CONFIG), Multiclass(CLASSES), partial=True) == []


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"depth": 3}, "  missing     blocks.2.norm1.weight (16,)"),
        ({"depth": 1}, "  unexpected  blocks.1.norm1.weight (16,)"),
        ({"mlp": 48}, "  reshaped    blocks.0.mlp.fc1.weight (32, 16), not (48, 16)"),
        ({"registers": 0}, "  unexpected  reg_token (1, 1, 16)"),
        ({"heads": 4}, "  reshaped    heads: 2, not 4"),
        ({"stem": "conv"}, "  reshaped    patch_embed.proj.weight (16, 3, 2, 2), not (16, 16, 1, 1)"),
        ({"stem": "conv", "channels": 1}, "  reshaped    patch_embed.proj.weight (16, 1, 2, 2), not (16, 16, 1, 1)"),
    ],
)
@torch.no_grad()
def test_another_body_takes_what_fits_if_that_is_asked_for(path, model, change, line):
    fresh = build(replace(CONFIG, **change))
    with pytest.raises(UserError, match="other options than the model to train"):
        start_from(path, fresh, Multiclass(CLASSES))
    assert line in start_from(path, fresh, Multiclass(CLASSES), partial=True)[-1].splitlines()
    assert torch.equal(fresh.blocks[0].attn.qkv.weight, model.blocks[0].attn.qkv.weight)
    assert torch.isfinite(fresh(images(fresh.config))).all()


def test_weights_of_which_nothing_fits_are_refused_all_the_same(path):
    with pytest.raises(UserError, match=r"Nothing in .*model\.safetensors fits the model:(.|\n)*reshaped"):
        start_from(path, build(replace(CONFIG, width=32, patch=4, mlp=64)), Multiclass(CLASSES), partial=True)


def test_a_model_tells_the_heads_that_its_weights_do_not_show(tmp_path):
    model = randomise(build(replace(CONFIG, img_size=(8, 8))))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    fresh = build(replace(CONFIG, img_size=(16, 8)))
    assert "timm weights of a vit_w16d2p2" in start_from(tmp_path / "model.safetensors", fresh, Multiclass(CLASSES))[0]
    assert torch.equal(fresh.blocks[1].attn.qkv.weight, model.blocks[1].attn.qkv.weight)
