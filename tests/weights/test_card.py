"""Model cards without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from vitrail.data.preprocess import Preprocess
from vitrail.errors import UserError
from vitrail.models import create
from vitrail.tasks import Multiclass
from vitrail.weights import Card, open_card, save
from vitrail.weights.card import read_card


@pytest.fixture
def path(tmp_path):
    model = create("vit_nano2", classes=2, img_size=8, channels=1)
    card = Card(model="vit_nano2", config=model.config, task=Multiclass(("a", "b")), preprocess=Preprocess((8, 8), 1))
    save(tmp_path / "model.safetensors", model, card)
    return tmp_path / "model.json"


def test_a_card_is_read_without_torch(path):
    code = f"""
import sys
from pathlib import Path
from vitrail.weights.card import read_card
card = read_card(Path({str(path)!r}))
assert card.classes == ("a", "b") and card.preprocess.img_size == (8, 8)
card.to_json()
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_card_that_was_read_is_the_one_that_was_written(path):
    document = json.loads(path.read_text())
    card = read_card(path)
    assert json.loads(json.dumps(card.to_json())) == document
    assert card.config.width == 128
    assert json.loads(json.dumps(card.to_json())) == document
    assert json.loads(json.dumps(replace(card, model="other").to_json())) == document | {"model": "other"}


def test_a_card_needs_an_architecture():
    with pytest.raises(TypeError, match="config"):
        Card(model="", task=Multiclass(()), preprocess=Preprocess((8, 8), 1))


@pytest.mark.parametrize(
    ("changes", "match"), [({"family": "wit"}, "'family' must be"), ({"config": {"classes": 2}}, "missing")]
)
def test_the_architecture_is_checked_when_the_weights_are_opened(path, changes, match):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    card = read_card(path)
    with pytest.raises(UserError, match=match):
        _ = card.config
    with pytest.raises(UserError, match=rf"model\.json.*{match}"):
        open_card(path.with_suffix(".safetensors"))


def test_classes_without_names(path):
    card = read_card(path)
    assert not card.numbered
    assert Card(**{**vars(card), "task": Multiclass(("0", "1"))}).numbered
