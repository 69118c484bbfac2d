"""Every family is saved, loaded, adapted and trained like a ViT."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import BACKBONES
from peers import distance, randomise

from vitrail import models
from vitrail.data.preprocess import Preprocess
from vitrail.errors import UserError
from vitrail.tasks import Multiclass
from vitrail.weights import Card, load, open_card, open_run, save, start_from

FAMILIES = [name for name in BACKBONES if name != "vit"]


@pytest.fixture(params=FAMILIES)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, models.Model]:
    """A small model of each family as a file."""
    config = models.configure(f"{request.param}_nano", classes=4)
    model = randomise(models.build(config))
    card = Card(
        model=f"{request.param}_nano",
        config=config,
        task=Multiclass(tuple("abcd")),
        preprocess=Preprocess(config.img_size, 3),
    )
    save(tmp_path / "model.safetensors", model, card)
    return tmp_path / "model.safetensors", model


@torch.no_grad()
def test_a_saved_model_is_loaded_with_its_architecture(saved):
    path, model = saved
    loaded, card = open_run(path)
    assert card.config == loaded.config == model.config
    x = torch.randn(2, 3, *model.config.img_size, generator=torch.Generator().manual_seed(1))
    assert torch.equal(loaded(x), model(x))


@torch.no_grad()
def test_classes_channels_and_size_are_adapted(saved):
    path, model = saved
    size = 32 if isinstance(model.config, models.MixerConfig) else 48
    loaded = load(path, classes=7, channels=1, img_size=size)
    assert loaded.config == replace(model.config, classes=7, channels=1, img_size=(size, size))
    grey = torch.randn(2, 1, size, size, generator=torch.Generator().manual_seed(1))
    assert not loaded(grey).any()  # a new head
    colours = models.resize(model, size).embed(grey.expand(-1, 3, -1, -1))
    # Filters that are standardised have their scale from all channels: no others answer alike.
    alike = not isinstance(model.config, (models.BiTConfig, models.HybridConfig))
    assert distance(loaded.embed(grey), colours) < (1e-4 if alike else 1.0)


def test_a_card_without_a_family_is_a_vits(tmp_path):
    config = models.configure("vit_nano8", classes=1, img_size=8)
    path = tmp_path / "model.safetensors"
    save(
        path,
        models.build(config),
        Card(model="vit_nano8", config=config, task=Multiclass(("a",)), preprocess=Preprocess((8, 8), 3)),
    )
    document = json.loads(path.with_suffix(".json").read_text())
    assert document.pop("family") == "vit"
    path.with_suffix(".json").write_text(json.dumps(document))
    assert load(path).config == config
    path.with_suffix(".json").write_text(json.dumps(document | {"family": "resnet"}))
    with pytest.raises(UserError, match=r"'family' must be one of vit, hybrid, .*, but it is 'resnet'"):
        load(path)


def test_weights_of_another_family_are_refused(saved):
    path, _ = saved
    model = models.create("vit_nano8", classes=4, img_size=32)
    with pytest.raises(UserError, match=r"are a \w+_nano, but the model to train is a vit_nano8"):
        start_from(path, model, Multiclass(tuple("abcd")))


def test_weights_of_a_deit_are_opened_by_its_kind(tmp_path):
    config = models.configure("deit_nano8", classes=1, img_size=8)
    card = Card(model="deit_nano8", config=config, task=Multiclass(("a",)), preprocess=Preprocess((8, 8), 3))
    save(tmp_path / "model.safetensors", models.build(config), card)
    assert open_card(tmp_path, "deit").model == "deit_nano8"
