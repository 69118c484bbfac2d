"""Trained models as files."""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peers import randomise
from safetensors.torch import load_file, save_file
from saved import CLASSES, CONFIG, card_of, images
from torch import nn

import vitrail
from vitrail import models
from vitrail.data.preprocess import Preprocess
from vitrail.errors import UserError
from vitrail.files import atomic_write
from vitrail.models import build
from vitrail.weights import load, open_card, open_run, save


@torch.no_grad()
def test_a_model_comes_back_as_it_was_saved(model, path):
    again, card = open_run(path)
    assert card == card_of()
    assert not again.training
    assert torch.equal(again(images()), model(images()))
    assert again.state_dict().keys() == model.state_dict().keys()
    assert torch.equal(load(path.parent)(images()), model(images()))
    assert torch.equal(vitrail.load(str(path))(images()), model(images()))


NANO = {name: config for name, config in models.CONFIGS.items() if name.endswith("_nano") or name == "vit_nano4"}
BODIES = NANO | {"tanh": replace(CONFIG, head="tanh"), "two heads": replace(CONFIG, pool="cls_dist")}


@pytest.mark.parametrize("config", BODIES.values(), ids=BODIES)
@torch.no_grad()
def test_a_body_comes_back_as_it_was_saved_and_gets_a_head(config, tmp_path):
    body = randomise(build(replace(config, classes=0)))
    path = tmp_path / "model.safetensors"
    save(path, body, card_of(body.config, (), Preprocess(config.img_size, config.channels)))
    again, card = open_run(path, headless=True)
    assert (card.classes, again.config) == ((), body.config)
    x = images(config)
    assert torch.equal(again(x), body(x))
    assert torch.equal(load(path)(x), body(x))
    with pytest.raises(UserError, match="has no classification head"):
        open_run(path)
    whole, card = open_run(path, classes=("a", "b"))
    assert card.classes == ("a", "b")
    assert torch.equal(whole.embed(x), body(x))
    assert whole(x).shape == (2, 2)
    save(path, whole, card)
    assert torch.equal(load(path, classes=0)(x), body(x))


def test_a_loaded_model_can_be_trained(path):
    model = load(path).train()
    model(images()).sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


def test_the_card_can_be_read_without_vitrail(path):
    document = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    assert document["classes"] == list(CLASSES)
    assert document["preprocess"] == {
        "img_size": [8, 12],
        "channels": 3,
        "crop": 0.9,
        "mean": [0.4, 0.5, 0.6],
        "std": [0.2],
        "bits": 8,
        "interpolation": "bicubic",
        "fit": "crop",
    }
    assert document["config"]["depth"] == 2
    assert document["metrics"] == {"top1": 0.75}
    assert {"vitrail", "torch", "python"} <= document["versions"].keys()
    assert load_file(path).keys() == build(CONFIG).state_dict().keys()


def test_saving_replaces_and_leaves_nothing_else(path, model):
    with torch.no_grad():
        model.head.weight.fill_(7.0)
    save(path, model, card_of(classes=("a", "b", "c")))
    again, card = open_run(path)
    assert (again.head.weight == 7).all()
    assert card.classes == ("a", "b", "c")
    assert {file.name for file in path.parent.iterdir()} == {"model.safetensors", "model.json"}


def test_whoever_may_read_the_card_may_read_the_weights(path):
    modes = {stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
    assert len(modes) == 1


def test_a_file_is_whole_or_as_before(tmp_path):
    path = tmp_path / "file"
    path.write_text("before")
    with pytest.raises(UnicodeEncodeError), atomic_write(path) as temporary:
        temporary.write_text("half" * 10_000 + "\udcff", encoding="utf-8")
    assert path.read_text() == "before"
    with atomic_write(path) as temporary:
        temporary.write_text("after")
        assert path.read_text() == "before"
    assert path.read_text() == "after"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    with (
        pytest.raises(UserError, match=r"Could not write .*nowhere.*file: No such file or directory"),
        atomic_write(tmp_path / "nowhere" / "file") as temporary,
    ):
        temporary.write_text("text")


# What is no model


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1])
def test_truncated_weights_are_refused_by_name(path, keep):
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"model\.safetensors is corrupt or truncated: .*\. Copy or train it again"):
        load(path)


def test_without_its_card_a_file_shows_all_but_the_heads(path):
    path.with_suffix(".json").unlink()
    with pytest.raises(UserError, match=r"width 16, whose tensors do not show the number of heads: it may be 1, 2\."):
        load(path, model=None)
    assert load(path, model=CONFIG).config == CONFIG


REMOVED = object()


def rewrite(path, where, value):
    """Changes one entry of the card, found as in "config.depth"."""
    card = path.with_suffix(".json")
    document = json.loads(card.read_text(encoding="utf-8"))
    *outer, name = where.split(".")
    inner = document[outer[0]] if outer else document
    if value is REMOVED:
        del inner[name]
    else:
        inner[name] = value
    card.write_text(json.dumps(document), encoding="utf-8")


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("config.depth", 3),
        ("config.depth", 1),
        ("config.width", 32),
        ("config.pool", "gap"),
    ],
)
def test_a_card_of_another_architecture_is_refused(path, where, value):
    rewrite(path, where, value)
    with pytest.raises(UserError, match=r"model\.safetensors does not fit the architecture in its model\.json:"):
        load(path)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("classes", REMOVED),
        ("classes", ["cat", "dog"]),
        ("classes", "cat"),
        ("classes", [1, 2, 3]),
        ("config", REMOVED),
        ("config", 3),
        ("config.colour", 1),
        ("config.depth", "two"),
        ("config.heads", 3),
        ("config.img_size", [8, 8]),
        ("config.width", REMOVED),
        ("preprocess", None),
        ("preprocess.mean", REMOVED),
        ("preprocess.std", [0]),
    ],
)
def test_a_card_that_says_something_impossible_is_named(path, where, value):
    rewrite(path, where, value)
    with pytest.raises(UserError, match=r"model\.json"):
        load(path)


@pytest.mark.parametrize("content", [b"", b"[1, 2]", b"{", b"\xff\x00", b"null", b'"text"'])
def test_a_card_of_something_else_is_named(path, content):
    path.with_suffix(".json").write_bytes(content)
    with pytest.raises(UserError, match=r"model\.json is not a vitrail model card"):
        load(path)


def test_foreign_files_are_refused_by_name(tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"x")
    with pytest.raises(UserError, match=r"model\.onnx is an exported file, which only predicts"):
        load(tmp_path / "model.onnx")
    (tmp_path / "model.txt").write_bytes(b"x")
    with pytest.raises(UserError, match=r"run folder or a \.safetensors, .* file, but .*model\.txt is neither"):
        load(tmp_path / "model.txt")
    with pytest.raises(UserError, match="nowhere is neither a run folder nor a weights file"):
        load(tmp_path / "nowhere")
    with pytest.raises(UserError, match="neither a run folder nor a weights file"):
        load(tmp_path)
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match=r"other\.safetensors is not a model known from .*: it"):
        load(tmp_path / "other.safetensors")


def test_weights_of_another_model_beside_the_card_are_refused(path):
    save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(UserError, match="does not fit the architecture"):
        load(path)


def test_a_run_without_weights_yet_says_how_to_go_on(tmp_path):
    (tmp_path / "config.yaml").touch()
    with pytest.raises(UserError, match=r"first epoch is not finished\. Continue it with --resume"):
        load(tmp_path)


@pytest.mark.parametrize("device", ["cuda:77", "gpu", "nonsense:1"])
def test_a_device_that_is_not_there_is_not_blamed_on_the_file(path, device):
    with pytest.raises(UserError, match=rf"device '{device}' cannot be used"):
        load(path, device=device)


# Memory


GROWTH = """
import re, sys, torch
from pathlib import Path
from vitrail.weights import load

def peak():
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

torch.zeros(8, 8) @ torch.zeros(8, 8)
before = peak()
model = load(sys.argv[1])
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells it")
def test_loading_takes_little_more_memory_than_the_file(tmp_path):
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in models.create("vit_b16").state_dict().items()}
    path = tmp_path / "b16.safetensors"
    save_file({name: torch.full(shape, 0.5) for name, shape in shapes.items()}, path)
    size = path.stat().st_size
    assert size > 340e6
    answer = subprocess.run([sys.executable, "-c", GROWTH, path], capture_output=True, text=True, check=True)
    assert 0.9 * size < int(answer.stdout) < 1.3 * size


@torch.no_grad()
@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_a_loaded_model_changes_neither_its_file_nor_with_it(tmp_path, model, suffix):
    path = tmp_path / f"m{suffix}"
    state = model.state_dict() if suffix == ".safetensors" else model.state_dict() | {"norm.bias": model.norm.weight}
    save_file(state, path) if suffix == ".safetensors" else torch.save(state, path)
    content = path.read_bytes()
    loaded = load(path, CONFIG)
    loaded.norm.weight.fill_(7.0)
    assert path.read_bytes() == content
    assert not (loaded.norm.bias == 7).any()  # though two names shared it in the file


@torch.no_grad()
def test_a_state_dict_in_memory_is_copied(model):
    tied = model.state_dict() | {"norm.bias": model.norm.weight}
    for source in (tied, {"model": tied}):
        loaded = load(source, CONFIG)
        before = model.norm.weight.clone()
        loaded.norm.weight.fill_(7.0)
        assert torch.equal(model.norm.weight, before)
        assert torch.equal(loaded.norm.bias, before)


def test_the_model_of_a_run_is_the_one_that_was_measured(trained, tmp_path):
    card = open_card(trained)
    assert card.model == "vit_nano4"
    assert card.classes == tuple("0123456789")
    assert card.preprocess.img_size == card.config.img_size == (8, 8)
    measured = vitrail.evaluate(trained, out=tmp_path / "evaluation")
    assert card.metrics["top1"] == pytest.approx(measured.top1, abs=1e-6)
    assert card.metrics["loss"] == pytest.approx(measured.loss, abs=1e-6)


@torch.no_grad()
def test_two_files_are_all_that_has_to_be_copied(trained, tmp_path):
    for name in ("model.safetensors", "model.json"):
        shutil.copy(trained / name, tmp_path)
    model = load(tmp_path / "model.safetensors")
    assert isinstance(model, nn.Module)
    assert torch.equal(model(images(model.config)), load(trained)(images(model.config)))
