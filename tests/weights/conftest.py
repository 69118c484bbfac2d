"""The model of saved.py, and the file that it is saved to."""

from __future__ import annotations

import pytest
from peers import randomise
from saved import CONFIG, card_of

from vitrail.models import build
from vitrail.weights import save


@pytest.fixture
def model():
    return randomise(build(CONFIG))


@pytest.fixture
def path(tmp_path, model):
    save(tmp_path / "model.safetensors", model, card_of())
    return tmp_path / "model.safetensors"
