"""Weights of the hub, from its cache: there is no network in tests."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from peers import randomise
from safetensors.torch import save_file

from vitrail.errors import UserError
from vitrail.models import build
from vitrail.models.vit import ViTConfig
from vitrail.weights import absolute, home, load, open_card

CONFIG = ViTConfig(width=16, depth=1, heads=2, mlp=32, patch=4, img_size=(8, 8), classes=3)
COMMIT = "0" * 40


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, without a network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def keep(cache, repository, model, suffix=".safetensors"):
    """A repository as the hub's own program leaves it in the cache."""
    folder = cache / f"models--{repository.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    if suffix == ".safetensors":
        save_file(model.state_dict(), snapshot / "model.safetensors")
    else:
        torch.save(model.state_dict(), snapshot / "pytorch_model.bin")
    about = {"input_size": [3, 8, 8], "mean": [0.1, 0.2, 0.3], "std": [0.4, 0.4, 0.4], "crop_pct": 0.75}
    (snapshot / "config.json").write_text(json.dumps({"pretrained_cfg": about, "model_args": {"num_heads": 2}}))


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_names_of_timm_and_of_repositories(cache, suffix):
    model = randomise(build(CONFIG))
    keep(cache, "timm/small", model, suffix)
    for source in ("timm:small", "hf:timm/small"):
        assert torch.equal(load(source).blocks[0].attn.qkv.weight, model.blocks[0].attn.qkv.weight)
        card = open_card(source)
        assert card.config == CONFIG
        assert card.preprocess.mean == (0.1, 0.2, 0.3)
        assert card.preprocess.crop == 0.75
        assert absolute(source) == source
        assert home(source) == Path()  # nothing is written into the cache


def test_what_is_not_there_says_how_to_get_it():
    with pytest.raises(
        UserError, match=r"timm:other cannot be had: it is not in the cache .* the hub cannot be reached"
    ):
        load("timm:other")
    with pytest.raises(UserError, match="'hf:' names no weights: write hf:OWNER/NAME"):
        load("hf:")
    with pytest.raises(UserError, match="hf:a/b/c cannot be had from the hub"):
        load("hf:a/b/c")
