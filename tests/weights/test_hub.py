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


def keep(cache, repository, model, suffix=".safetensors", revision="main", commit=COMMIT):
    """A repository as the hub's own program leaves it in the cache."""
    folder = cache / f"models--{repository.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / revision).write_text(commit)
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    if suffix == "parts":
        split(model.state_dict(), snapshot)
    elif suffix == ".safetensors":
        save_file(model.state_dict(), snapshot / "model.safetensors")
    else:
        torch.save(model.state_dict(), snapshot / "pytorch_model.bin")
    about = {"input_size": [3, 8, 8], "mean": [0.1, 0.2, 0.3], "std": [0.4, 0.4, 0.4], "crop_pct": 0.75}
    (snapshot / "config.json").write_text(json.dumps({"pretrained_cfg": about, "model_args": {"num_heads": 2}}))
    return snapshot


def split(state, folder):
    """Weights in two files with an index."""
    names = sorted(state)
    files = {name: f"model-0000{1 + (i > 9)}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: state[name] for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


@pytest.mark.parametrize("suffix", [".safetensors", ".bin", "parts"])
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


def test_a_revision_follows_the_name(cache):
    models = {"main": randomise(build(CONFIG), 1), "v2": randomise(build(CONFIG), 2)}
    for number, (revision, model) in enumerate(models.items()):
        keep(cache, "timm/small", model, revision=revision, commit=str(number) * 40)
    for source, revision in {
        "timm:small": "main",
        "hf:timm/small@v2": "v2",
        "timm:small@v2": "v2",
        f"hf:timm/small@{'1' * 40}": "v2",
    }.items():
        assert torch.equal(load(source).norm.weight, models[revision].norm.weight)
    with pytest.raises(UserError, match="hf:timm/small@v3 is not in the cache"):
        load("hf:timm/small@v3")


def test_a_part_that_is_not_in_the_cache_is_counted(cache):
    snapshot = keep(cache, "timm/small", build(CONFIG), "parts")
    (snapshot / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match="1 of 2 shards of timm:small are not in the cache"):
        load("timm:small")


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "model.sh"])
def test_an_index_that_points_elsewhere_is_not_followed(cache, file):
    snapshot = keep(cache, "timm/small", build(CONFIG), "parts")
    index = {"weight_map": {"norm.weight": file}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="shards must be weights files in the folder of the index"):
        load("timm:small")


def test_without_a_network_it_is_said_at_once(monkeypatch):
    """The hub's own client would retry for half a minute."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")

    def retry(*_args, **_settings):
        raise AssertionError("the client must not be asked")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", retry)
    with pytest.raises(UserError, match=r"timm:other is not in .*, and the hub cannot be reached"):
        load("timm:other")


def test_what_is_not_there_says_how_to_get_it():
    with pytest.raises(UserError, match=r"timm:other is not in .*, and HF_HUB_OFFLINE is set"):
        load("timm:other")
    with pytest.raises(UserError, match=r"'hf:' has no name\. Write hf:OWNER/NAME"):
        load("hf:")
    with pytest.raises(UserError, match="hf:a/b/c cannot be downloaded from the hub"):
        load("hf:a/b/c")
