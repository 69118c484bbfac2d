"""Recipes and options of every family."""

from __future__ import annotations

from typing import get_args

import pytest
from families import BACKBONES

from vitrail import models
from vitrail.config import ArchConfig, options
from vitrail.data import open_data
from vitrail.errors import UserError
from vitrail.tasks import Multiclass
from vitrail.train.prepare import model_config
from vitrail.train.resolve import resolve


@pytest.fixture(scope="module")
def digits_data():
    return open_data("digits")


@pytest.mark.parametrize("family", BACKBONES)
@pytest.mark.parametrize("recipe", ["small", "augreg", "deit3"])
def test_a_family_may_stand_for_its_small_model(family, recipe, digits_data):
    config = resolve("digits", digits_data, {"model": family, "recipe": recipe, "device": "cpu"})
    assert config.model == (f"{family}_nano" if family != "vit" else "vit_nano2")
    architecture = model_config(config, Multiclass(tuple("0123456789")))
    assert models.family(architecture) == family
    assert (architecture.classes, architecture.channels) == (10, 1)
    assert architecture.drop_path == config.arch.drop_path
    if family != "vit":
        assert config.arch.pool is config.arch.registers is None


@pytest.mark.parametrize("family", [name for name in BACKBONES if name != "vit"])
def test_photographs_get_a_published_model(family, digits_data):
    config = resolve("digits", digits_data, {"model": family, "img_size": 128, "device": "cpu"})
    assert config.model in models.CONFIGS
    assert config.model.endswith("_nano") is False


def test_what_only_vits_have_is_refused_for_others(digits_data):
    with pytest.raises(UserError, match=r"A swin has no option 'pool'; only a ViT has\. Remove --pool"):
        resolve("digits", digits_data, {"model": "swin_nano", "pool": "gap"})


def choices(option):
    """The values of an option that has a fixed set of them."""
    parts = [part for part in get_args(option.type) if part is not type(None)]
    return {value for part in parts for value in (get_args(part) or [part])}


@pytest.mark.parametrize("family", BACKBONES)
def test_an_option_means_the_same_in_every_family(family):
    """What a recipe sets by its name in ArchConfig is read by that name from a family's configuration."""
    known = options(ArchConfig)
    own = options(models.FAMILIES[family][0])
    assert {"drop", "drop_path"} <= own.keys() & known.keys()
    for name in own.keys() & known.keys():
        assert known[name].type in (own[name].type, own[name].type | None) or choices(own[name]) <= choices(known[name])
