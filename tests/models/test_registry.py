"""Families are found by their exact type, and can be added from outside."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from vitrail import models
from vitrail.errors import UserError
from vitrail.models.vit import ViT, ViTConfig


@dataclass(frozen=True)
class OddConfig(ViTConfig):
    """A ViT that somebody has changed."""


class Odd(ViT):
    pass


ODD = OddConfig(32, 1, 2, 64, 4, (8, 8), classes=3)


@pytest.fixture
def odd():
    models.register("odd", OddConfig, Odd, {"odd_tiny": ODD})
    yield
    del models.FAMILIES["odd"], models.CONFIGS["odd_tiny"]


@pytest.mark.usefixtures("odd")
def test_a_subclass_is_a_family_of_its_own():
    assert models.family(ODD) == "odd"
    assert type(models.build(ODD)) is Odd
    assert type(models.create("odd_tiny", classes=2)) is Odd
    assert models.family(models.CONFIGS["vit_b16"]) == "vit"
    assert models.name_of(ODD) == "odd_tiny"
    assert models.is_meant("odd_tiny", "odd")


def test_what_is_not_registered_is_told():
    with pytest.raises(UserError, match="OddConfig belongs to no known family"):
        models.build(ODD)


@pytest.mark.parametrize(("name", "configs"), [("vit", {}), ("odd", {"vit_b16": ODD})])
def test_a_name_that_is_taken_is_refused(name, configs):
    with pytest.raises(UserError, match="There already is a model"):
        models.register(name, OddConfig, Odd, configs)
    assert "odd" not in models.FAMILIES
