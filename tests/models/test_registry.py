"""Families are found by their exact type, and can be added from outside."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

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


def test_nobody_else_asks_which_family_a_model_is():
    """Outside `models/` and `weights/` no family is imported: a model says itself what it can do."""
    package = Path(models.__file__).parents[1]
    kinds = {kind.__name__ for pair in models.FAMILIES.values() for kind in pair}
    for path in package.rglob("*.py"):
        if path.relative_to(package).parts[0] in ("models", "weights"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                assert not kinds & {alias.name for alias in node.names}, path
