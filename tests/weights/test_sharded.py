"""Weights in several files are read as if they lay in one, and what their index says is not trusted."""

from __future__ import annotations

import json

import pytest
import torch
from peers import randomise
from safetensors.torch import save_file

from vitrail.errors import UserError
from vitrail.models import build
from vitrail.models.vit import ViTConfig
from vitrail.tasks import Multiclass
from vitrail.weights import load, open_card, start_from

CONFIG = ViTConfig(width=16, depth=2, heads=2, mlp=32, patch=4, img_size=(8, 8), classes=3)
INDEX = {".safetensors": "model.safetensors.index.json", ".bin": "pytorch_model.bin.index.json"}


@pytest.fixture(scope="module")
def state():
    return randomise(build(CONFIG)).state_dict()


def cut(state, folder, suffix=".safetensors", count=3):
    """The names of the parts."""
    files = {name: f"model-{1 + i % count:05}-of-{count:05}{suffix}" for i, name in enumerate(state)}
    for file in set(files.values()):
        part = {name: value for name, value in state.items() if files[name] == file}
        save_file(part, folder / file) if suffix == ".safetensors" else torch.save(part, folder / file)
    (folder / INDEX[suffix]).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": files}))
    return sorted(set(files.values()))


@pytest.mark.parametrize("suffix", INDEX)
def test_parts_are_one_model(tmp_path, state, suffix):
    cut(state, tmp_path, suffix)
    (tmp_path / "config.json").write_text(json.dumps({"pretrained_cfg": {"input_size": [3, 8, 8]}}))
    for source in (tmp_path, tmp_path / INDEX[suffix]):
        loaded = load(source, CONFIG).state_dict()
        assert all(torch.equal(value, state[name]) for name, value in loaded.items())
    fresh = build(CONFIG)
    start_from(tmp_path, fresh, Multiclass(("0", "1", "2")))
    assert torch.equal(fresh.norm.weight, state["norm.weight"])


def test_a_missing_part_is_named(tmp_path, state):
    first, *_ = cut(state, tmp_path)
    (tmp_path / first).unlink()
    with pytest.raises(UserError, match=rf"1 of 3 shards are missing: {first}"):
        load(tmp_path, CONFIG)
    (tmp_path / first).mkdir()
    with pytest.raises(UserError, match=rf"1 of 3 shards are missing: {first}"):
        load(tmp_path, CONFIG)


@pytest.mark.parametrize("suffix", INDEX)
def test_a_damaged_part_is_named(tmp_path, state, suffix):
    *_, last = cut(state, tmp_path, suffix)
    (tmp_path / last).write_bytes((tmp_path / last).read_bytes()[:-40])
    with pytest.raises(UserError, match=rf"{last} is (corrupt|damaged)"):
        load(tmp_path, CONFIG)


def test_a_part_of_another_model_is_named(tmp_path, state):
    *_, last = cut(state, tmp_path)
    save_file({"x": torch.zeros(1)}, tmp_path / last)
    with pytest.raises(UserError, match=rf"{last} does not match model\.safetensors\.index\.json"):
        load(tmp_path, CONFIG)


@pytest.mark.parametrize(
    "file",
    ["../m.safetensors", "/tmp/m.safetensors", "a/../m.pth", "..", ".", "", "m.sh", "x" * 5000 + ".pth", INDEX[".bin"]],
)
def test_an_index_that_points_elsewhere_is_refused(tmp_path, state, file):
    folder = tmp_path / "inner"
    folder.mkdir()
    save_file(state, tmp_path / "m.safetensors")
    (folder / INDEX[".safetensors"]).write_text(json.dumps({"weight_map": dict.fromkeys(state, file)}))
    with pytest.raises(UserError, match="shards must be weights files in the folder of the index"):
        load(folder, CONFIG)


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "{", "null", "\x00\xff", "[" * 100_000),
        *(
            '{"weight_map": []}',
            '{"weight_map": {}}',
            '{"weight_map": {"a": 3}}',
            '{"weight_map": {"a": "\\u0000.pth"}}',
        ),
    ],
    ids=range(10),
)
def test_an_index_of_something_else(tmp_path, content):
    (tmp_path / INDEX[".safetensors"]).write_text(content)
    for reading in (load, open_card):
        with pytest.raises(UserError, match=r"model\.safetensors\.index\.json"):
            reading(tmp_path)


def test_links_are_followed_as_the_cache_of_the_hub_has_them(tmp_path, state):
    """Their targets lie elsewhere under other names."""
    store, folder = tmp_path / "blobs", tmp_path / "snapshot"
    store.mkdir()
    folder.mkdir()
    cut(state, store)
    for number, file in enumerate(sorted(store.iterdir())):
        (folder / file.name).symlink_to(file.rename(store / str(number)))
    assert torch.equal(load(folder, CONFIG).norm.weight, state["norm.weight"])
