"""Runs that fine-tune trained weights: whole, in part or with adapters."""

from __future__ import annotations

import json
import shutil

import numpy as np
import peers
import pytest
import torch
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits

import vitrail
from vitrail.data.preprocess import Preprocess
from vitrail.errors import UserError
from vitrail.models import build
from vitrail.models.ema import Ema
from vitrail.models.position import resample_state
from vitrail.models.vit import ViTConfig
from vitrail.tasks import Multiclass
from vitrail.train.checkpoint import checkpoint_path, load_checkpoint
from vitrail.weights import Card, save

pytestmark = pytest.mark.usefixtures("plain_runs")

WIDTH, DEPTH = 16, 3
SMALL = ViTConfig(
    width=WIDTH, depth=DEPTH, heads=2, mlp=32, patch=4, img_size=(8, 8), channels=1, classes=10, drop=0.2, drop_path=0.3
)
CLASSES = tuple("abcdefghij")  # not those of digits, so that a head is new
HEAD = {"head.weight", "head.bias"}


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Weights in which no parameter is zero or one, for digits of other names."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    card = Card(model="vit_nano4", config=SMALL, task=Multiclass(CLASSES), preprocess=Preprocess((8, 8), 1))
    save(path, peers.randomise(build(SMALL)), card)
    return path


@pytest.fixture
def train(weights, tmp_path):
    """Fine-tunes on half of the digits for an epoch, and says into which folder."""

    def train(**settings):
        base = {"weights": weights, "val_fraction": 0.5, "batch_size": 100, "epochs": 1, "out": tmp_path}
        return vitrail.train("digits", **(base | settings))

    return train


def block(number):
    return {f"blocks.{number}.{name}" for name, _ in build(SMALL).blocks[number].named_parameters()}


def images(count=4):
    return torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(1))


# Whole runs

EVERY = {
    "freeze all": {"freeze": "all"},
    "freeze 2": {"freeze": "2"},
    "lora": {"lora_rank": 2},
    "lora after 2 blocks": {"lora_rank": 2, "freeze": 2},
}
every_way = pytest.mark.parametrize("asked", EVERY.values(), ids=EVERY)


@every_way
def test_a_run_leaves_a_plain_model_whose_frozen_part_is_that_of_the_weights(train, weights, asked, caplog):
    run = train(**asked, epochs=2, weight_decay=0.1)
    before, after = load_file(weights), load_file(run / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert after.keys() == before.keys()
    blocks = [2] if "freeze" in asked else [0, 1, 2]
    attention = {f"blocks.{i}.attn.{layer}.weight" for i in blocks for layer in ("qkv", "proj")}
    tuned = attention if "lora_rank" in asked else block(2) | {"norm.weight", "norm.bias"}
    assert changed == HEAD | (set() if asked == EVERY["freeze all"] else tuned)
    assert "parameters are trainable" in caplog.text
    assert round(vitrail.evaluate(run).top1, 6) == json.loads((run / "model.json").read_text())["metrics"]["top1"]


@every_way
def test_it_goes_on_exactly(train, asked, monkeypatch):
    """With an average, dropout and Muon, or what is left of it; stopped in the middle of an epoch."""
    settings = asked | {"epochs": 2, "model_ema": 0.9, "opt": "muon", "recipe": "small", "save_minutes": 0.0}
    straight = train(**settings, name="straight")

    class Stopped(Exception):
        pass

    update = Ema.update

    def stop(self, model, step):
        update(self, model, step)
        if step == 13:
            raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(Ema, "update", stop)
        with pytest.raises(Stopped):
            train(**settings, name="resumed")
    resumed = straight.path.parent / "resumed"
    assert load_checkpoint(resumed, "cpu")["progress"]["step"] == 13
    vitrail.train(resume=resumed)
    ours, theirs = (load_checkpoint(run, "cpu") for run in (resumed, straight))
    for part in ("model", "kept"):
        assert all(torch.equal(value, theirs[part][name]) for name, value in ours[part].items())
    assert (resumed / "model.safetensors").read_bytes() == (straight / "model.safetensors").read_bytes()


def test_adapters_are_in_the_checkpoint_and_not_in_the_model(train):
    run = train(lora_rank=2)
    state = load_checkpoint(run, "cpu")
    assert state["model"]["blocks.0.attn.qkv.down"].shape == (3, 2, WIDTH)
    assert checkpoint_path(run).exists()
    assert not [name for name in load_file(run / "model.safetensors") if name.endswith((".down", ".up"))]


def test_the_other_verbs_take_the_merged_model(train, digits, tmp_path):
    run = train(lora_rank=2)
    vitrail.convert(run, tmp_path / "timm.safetensors", to="timm")
    again = vitrail.load(tmp_path / "timm.safetensors")
    image = images(1)
    torch.testing.assert_close(again(image), vitrail.load(run)(image))
    [prediction] = vitrail.predict(run, [str(next(digits.rglob("*.png")))])
    assert prediction


@pytest.mark.parametrize(
    "asked",
    [
        {"freeze": "all", "find_lr": True, "opt": "muon"},
        {"lora_rank": 2, "folds": 2, "grad_checkpointing": True, "amp": "bf16"},
    ],
    ids=str,
)
def test_it_works_with_everything_else(train, asked):
    assert train(**asked).path.is_dir()


def test_a_compiled_model_learns_the_same(train, monkeypatch):
    """All of torch.compile but its C++ compiler, which takes long."""
    compile = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda model: compile(model, backend="aot_eager"))
    settings = {"lora_rank": 2, "freeze": 1, "drop": 0.0, "drop_path": 0.0}
    torch.compiler.reset()
    ours, theirs = (load_checkpoint(train(**settings, compile=on), "cpu")["model"] for on in (True, False))
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-3, atol=1e-5)


# At another size, with other classes and channels, from weights of others


@pytest.fixture
def colours(tmp_path_factory):
    """An .npz of red and green images, 24 pixels a side: another size, other channels, other classes."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 80, (120, 24, 24, 3), dtype=np.uint8)
    labels = np.arange(120) % 2
    images[np.arange(120), :, :, labels] += 150
    path = tmp_path_factory.mktemp("colours") / "colours.npz"
    np.savez(path, images=images, labels=labels, classes=np.array(["red", "green"]))
    return path


@pytest.mark.parametrize("asked", [{}, {"freeze": "all"}, {"lora_rank": 4, "model_ema": 0.9999}], ids=str)
def test_weights_are_tuned_at_another_size_with_other_classes_and_channels(weights, colours, tmp_path, caplog, asked):
    run = vitrail.train(colours, weights=weights, img_size=24, epochs=1, out=tmp_path, **asked)
    for note in ("resampled from 2x2 to 6x6 patches", "from 1 to 3 channels", "new head for 2 classes"):
        assert note in caplog.text
    before, after = load_file(weights), load_file(run / "model.safetensors")
    assert after["pos_embed"].shape == (1, 37, WIDTH)
    assert torch.equal(before["norm.weight"], after["norm.weight"]) == bool(asked)


def test_positions_are_resampled_as_asked(weights, colours, tmp_path, caplog):
    settings = {"weights": weights, "img_size": 24, "epochs": 1, "freeze": 0, "out": tmp_path}
    runs = {how: vitrail.train(colours, pos_resample=how, **settings) for how in ("bicubic", "bilinear", "linear")}
    assert all(f"resampled from 2x2 to 6x6 patches ({how})" in caplog.text for how in runs)
    rows = [load_file(run / "model.safetensors")["pos_embed"] for run in runs.values()]
    assert not torch.allclose(rows[0], rows[1], atol=1e-3)
    before = load_file(weights)["pos_embed"]
    for positions, method in zip(rows, runs, strict=True):
        expected = resample_state({"pos_embed": before}, (2, 2), (6, 6), method)["pos_embed"]
        assert torch.equal(positions, expected)  # frozen, they stay what they became


def test_weights_of_others_are_tuned_at_another_size(colours, tmp_path, caplog):
    peer = peers.timm().create_model("vit_tiny_patch16_224", img_size=16, patch_size=8, depth=2, num_classes=7)
    torch.save(peers.randomise(peer).state_dict(), tmp_path / "peer.pth")
    run = vitrail.train(
        colours, weights=tmp_path / "peer.pth", img_size=24, lora_rank=4, epochs=1, out=tmp_path / "runs"
    )
    for note in ("timm weights of a", "resampled from 2x2 to 3x3 patches", "new head for 2 classes"):
        assert note in caplog.text
    after = load_file(run / "model.safetensors")
    assert torch.equal(after["blocks.1.mlp.fc1.weight"], peer.state_dict()["blocks.1.mlp.fc1.weight"])
    assert not torch.equal(after["blocks.1.attn.qkv.weight"], peer.state_dict()["blocks.1.attn.qkv.weight"])


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"model": "vit_b16"}, "are a vit_nano4, but --model asks for vit_b16"),
        ({"pool": "map"}, "with other options than the model to train"),
    ],
    ids=str,
)
def test_weights_of_another_architecture_are_refused(train, tmp_path, asked, message):
    with pytest.raises(UserError) as caught:
        train(**asked)
    assert message in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_what_fits_of_another_architecture_is_taken_if_asked(train, weights, caplog):
    run = train(pool="map", partial=True, freeze=DEPTH)
    before, after = load_file(weights), load_file(run / "model.safetensors")
    assert torch.equal(before["blocks.0.attn.qkv.weight"], after["blocks.0.attn.qkv.weight"])
    assert "attn_pool" in caplog.text


# What makes no sense


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"freeze": DEPTH + 1},
            "at most the model's 3 blocks, but it is 4. To train only the head, use --freeze all",
        ),
        ({"freeze": -1}, "'freeze' must be all, image, or a number of blocks from 0, but it is -1"),
        ({"freeze": "some"}, "'freeze' must be all, image, or a number of blocks from 0, but it is 'some'"),
        ({"freeze": "all", "lora_rank": 4}, "--freeze all leaves no block for --lora-rank to adapt"),
        ({"freeze": DEPTH, "lora_rank": 4}, "--freeze 3 leaves no block for --lora-rank to adapt"),
        ({"lora_rank": 17}, "'lora_rank' must be at most the model's width, 16, but it is 17"),
        ({"lora_rank": -1}, "'lora_rank' must be at least 0, but it is -1"),
        ({"weights": None, "head_init": "probe"}, "--head-init needs trained weights"),
        ({"lora_alpha": 4.0}, "--lora-alpha needs LoRA adapters. Add --lora-rank"),
        ({"lora_rank": 4, "lora_alpha": 0.0}, "'lora_alpha' must be above 0"),
        ({"freeze": 1, "weights": None}, "--freeze needs trained weights. Add --weights"),
        ({"lora_rank": 1, "weights": None}, "--lora-rank needs trained weights"),
        ({"partial": True, "weights": None}, "--partial needs trained weights"),
        ({"pos_resample": "linear", "weights": None}, "--pos-resample needs trained weights"),
        ({"pos_resample": "cubic"}, "'pos_resample' must be one of bicubic, bicubic_plain, "),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused_before_there_is_a_run(train, tmp_path, asked, message):
    with pytest.raises(UserError) as caught:
        train(**asked)
    assert message in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_run_does_not_go_on_with_another_part_frozen(train):
    run = train(freeze=2)
    with pytest.raises(UserError, match="this asks for freeze 1 instead of 2"):
        vitrail.train(resume=run, freeze=1)
    assert vitrail.train(resume=run, freeze="2") == run


def test_a_run_from_before_these_settings_goes_on(train):
    run = train()
    file = run / "config.yaml"
    text = file.read_text()
    start = text.index("transfer:")
    file.write_text(text[:start] + text[text.index("optim:") :])
    assert vitrail.train(resume=run) == run


def test_any_weights_are_fine_tuned_with_another_attention_pattern(train, weights):
    """With adapters, recomputed activations, at another resolution, and averaged."""
    run = train(
        attention="window:2,shift", img_size=16, lora_rank=2, grad_checkpointing=True, model_ema=0.9, amp="bf16"
    )
    model, card = vitrail.weights.open_run(run.path)
    assert card.config.attention == "window:2,shift"
    assert card.config.grid == (4, 4)
    assert "window:2,shift attention" in (run.path / "train.log").read_text()
    frozen, after = load_file(weights), model.state_dict()
    assert after.keys() == frozen.keys()
    assert torch.equal(after["blocks.0.mlp.fc1.weight"], frozen["blocks.0.mlp.fc1.weight"])
    assert not torch.equal(after["blocks.0.attn.qkv.weight"], frozen["blocks.0.attn.qkv.weight"])
    with pytest.raises(UserError, match="the attention pattern 'window:2,shift', which timm does not support"):
        vitrail.convert(run.path, run.path / "timm.safetensors", to="timm")


def test_a_wrong_attention_pattern_is_refused_before_anything_starts(train, tmp_path):
    with pytest.raises(UserError, match="'attention' must be global, window:SIZE"):
        train(attention="windows")
    with pytest.raises(UserError, match="A swin has no option 'attention'"):
        vitrail.train("digits", model="swin_nano", attention="axial", out=tmp_path)
    assert not list(tmp_path.iterdir())


# A new head


def test_a_new_head_starts_as_a_linear_probe(trained, tmp_path, caplog):
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels.reshape(-1, 8, 8) * 15).astype(np.uint8)
    np.savez(tmp_path / "parity.npz", images=images, labels=np.array(["even", "odd"])[labels % 2])
    settings = {"weights": trained, "epochs": 1, "lr": 1e-9, "out": tmp_path}
    start = vitrail.train(tmp_path / "parity.npz", **settings)
    assert "The new head starts as a linear probe of 1,438 training images." in caplog.text
    assert vitrail.evaluate(start).top1 > 0.9
    zero = vitrail.train(tmp_path / "parity.npz", **settings, head_init="zero")
    assert load_file(zero / "model.safetensors")["head.weight"].abs().max() < 1e-6


def test_a_head_on_features_that_hardly_differ_has_no_long_weights(trained, tmp_path):
    alike = tmp_path / "alike"
    shutil.copytree(trained, alike)
    state = load_file(alike / "model.safetensors")
    state["norm.weight"].mul_(0.01)
    state["norm.bias"].fill_(1.0)
    save_file(state, alike / "model.safetensors")
    pixels = np.random.default_rng(0).integers(0, 255, (60, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "two.npz", images=pixels, labels=np.array(["a", "b"])[np.arange(60) % 2])
    start = vitrail.train(tmp_path / "two.npz", weights=alike, epochs=1, lr=1e-9, out=tmp_path, name="start")
    weights = load_file(start / "model.safetensors")["head.weight"]
    assert float(weights.norm(dim=1).max()) == pytest.approx(2.0, rel=1e-3)


@pytest.mark.parametrize("model", ["bit_nano", "coatnet_nano", "mixer_nano", "swin_nano"])
def test_the_head_of_any_family_is_fitted_to_what_it_reads(model, tmp_path):
    first = vitrail.train("digits", model=model, img_size=32, epochs=0.05, out=tmp_path, name="first")
    pixels = np.random.default_rng(0).integers(0, 100, (60, 32, 32), dtype=np.uint8)
    labels = np.arange(60) % 2
    pixels[labels == 1] += 100
    np.savez(tmp_path / "shades.npz", images=pixels, labels=np.array(["dark", "light"])[labels])
    start = vitrail.train(tmp_path / "shades.npz", weights=first, epochs=1, lr=1e-9, out=tmp_path, name="start")
    assert vitrail.evaluate(start).top1 == 1.0


def test_a_head_of_the_same_classes_is_kept(trained, tmp_path, caplog):
    vitrail.train("digits", weights=trained, epochs=0.05, out=tmp_path)
    assert "linear probe" not in caplog.text


# Runs of vitrail


def test_a_run_is_tuned_to_other_images_and_classes(trained, colours, tmp_path):
    run = vitrail.train(colours, weights=trained, img_size=24, epochs=3, lr=0.01, out=tmp_path, name="run")
    config = run.config
    assert (config.recipe, config.model, config.weights) == ("finetune", "vit_nano4", str(trained))
    assert json.loads((run / "model.json").read_text())["classes"] == ["red", "green"]
    assert "position embeddings resampled from 2x2 to 6x6 patches" in (run / "train.log").read_text()
    assert vitrail.evaluate(run).top1 == 1.0


def test_the_same_weights_go_on_where_they_were(trained, tmp_path):
    run = vitrail.train("digits", weights=trained, epochs=1, out=tmp_path)
    before = json.loads((trained / "model.json").read_text())["metrics"]["top1"]
    assert run.history[0]["val_top1"] > before - 0.05
