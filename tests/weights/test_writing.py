"""Weights go to other formats and come back bit for bit, and the peers' own classes take them as their own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import peers
import pytest
import torch
from peers import TOLERANCE, distance, hf_vit, identical, images, jax_arrays, jax_forward, randomise, timm_vit
from safetensors.torch import load_file

from vitrail.data.preprocess import Preprocess
from vitrail.errors import UserError
from vitrail.models import build
from vitrail.models.vit import ViTConfig
from vitrail.tasks import Multiclass
from vitrail.verbs.convert import convert
from vitrail.weights import Card, load, open_card, open_run, save

CONFIG = ViTConfig(width=32, depth=2, heads=4, mlp=128, patch=4, img_size=(24, 24), classes=5)
DINOV2 = replace(CONFIG, layer_scale=1e-5)
GATED = replace(DINOV2, act="swiglu", mlp=88)


def ours(config=CONFIG):
    return randomise(build(config))


def keep(model, path):
    """Our model as a file with its card."""
    config = model.config
    names = tuple(f"class {i}" for i in range(config.classes))
    seen = Preprocess(config.img_size, config.channels, 0.9, (0.4,), (0.2,))
    save(path, model, Card(model="vit_w32", config=config, task=Multiclass(names), preprocess=seen))
    return path


# Theirs -> ours -> theirs


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (CONFIG, {}),
        (CONFIG, {"no_embed_class": True}),
        (replace(CONFIG, img_size=(24, 16)), {}),
        (replace(CONFIG, pool="cls_dist"), {}),
        (replace(CONFIG, pool="gap"), {}),
        (replace(CONFIG, pool="map"), {}),
        (replace(CONFIG, pool="mae"), {}),
        (replace(CONFIG, pool="gap_norm", registers=4), {"no_embed_class": True}),
        (DINOV2, {}),
        (replace(DINOV2, registers=4), {"no_embed_class": True}),
        (replace(GATED, registers=4), {"no_embed_class": True}),
    ],
    ids=[
        "plain",
        "DeiT III",
        "rectangular",
        "distilled DeiT",
        "gap",
        "map",
        "MAE",
        "gap_norm",
        "DINOv2",
        "DINOv2 with registers",
        "gated",
    ],
)
def test_timms_weights_come_back_as_they_were(tmp_path, config, options):
    theirs = timm_vit(config, **options).state_dict()
    own = convert(theirs, tmp_path / "own.safetensors", model=config)
    assert identical(load_file(convert(own, tmp_path / "timm.safetensors", to="timm")), theirs)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("ViTForImageClassification", CONFIG),
        ("ViTForImageClassification", replace(CONFIG, img_size=(24, 16))),
        ("DeiTForImageClassificationWithTeacher", replace(CONFIG, pool="cls_dist")),
        ("Dinov2ForImageClassification", replace(DINOV2, pool="cls_gap")),
        ("Dinov2ForImageClassification", replace(GATED, pool="cls_gap")),
        ("Dinov2WithRegistersForImageClassification", replace(DINOV2, pool="cls_gap", registers=3)),
    ],
    ids=["ViT", "rectangular", "distilled DeiT", "DINOv2", "gated", "registers"],
)
def test_hugging_faces_weights_come_back_as_they_were(tmp_path, name, config):
    hf_vit(name, config).save_pretrained(tmp_path / "theirs")
    own = convert(tmp_path / "theirs", tmp_path / "own.safetensors")
    back = load_file(convert(own, tmp_path / "back", to="hf"))
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    assert identical(*({n: v for n, v in state.items() if "mask_token" not in n} for state in (back, theirs)))


@pytest.mark.parametrize("name", ["ViTModel", "Dinov2Model", "Dinov2WithRegistersModel"])
def test_a_body_of_hugging_faces_comes_back_with_a_new_head(tmp_path, name):
    config = replace(DINOV2, registers=4) if name == "Dinov2WithRegistersModel" else CONFIG
    theirs = hf_vit(name, config)
    theirs.save_pretrained(tmp_path / "theirs")
    body = load_file(tmp_path / "theirs" / "model.safetensors")
    body = {n: v for n, v in body.items() if "mask_token" not in n}
    own = convert(tmp_path / "theirs", tmp_path / "own.safetensors", classes=3)
    if name == "ViTModel":  # whose pooler no classifier of theirs has
        with pytest.raises(UserError, match="a hidden tanh layer before the head, which hf does not support"):
            convert(own, tmp_path / "back", to="hf")
        return
    back = load_file(convert(own, tmp_path / "back", to="hf"))
    kind = {"Dinov2Model": "dinov2.", "Dinov2WithRegistersModel": "dinov2_with_registers."}[name]
    again = {n.removeprefix(kind): v for n, v in back.items() if n.startswith(kind) and "mask_token" not in n}
    assert identical(again, body)
    assert not back["classifier.weight"].any()


def test_torchvisions_weights_come_back_as_they_were(tmp_path):
    theirs = randomise(peers.TorchvisionViT(CONFIG)).state_dict()
    own = convert(theirs, tmp_path / "own.safetensors", model=CONFIG)
    assert identical(load_file(convert(own, tmp_path / "theirs.safetensors", to="torchvision")), theirs)


@pytest.mark.parametrize("head", ["tanh", "linear"])
def test_jax_arrays_come_back_as_they_were(tmp_path, head):
    arrays = jax_arrays(replace(CONFIG, head=head))
    np.savez(tmp_path / "theirs.npz", **arrays)
    own = convert(tmp_path / "theirs.npz", tmp_path / "own.safetensors")
    back = dict(np.load(convert(own, tmp_path / "back.npz", to="npz")))
    assert identical(*({n: torch.from_numpy(v) for n, v in state.items()} for state in (back, arrays)))


# Ours -> theirs -> ours


@pytest.mark.parametrize("size", [(24, 24), (24, 16)], ids=["square", "rectangular"])
@pytest.mark.parametrize(
    ("to", "config"),
    [
        ("vitrail", replace(CONFIG, stem="conv", pos="relative", pool="gap")),
        ("vitrail", replace(GATED, pool="cls_dist", registers=2)),
        ("timm", CONFIG),
        ("timm", replace(DINOV2, registers=2)),
        ("timm", replace(CONFIG, pool="map", registers=1)),
        ("timm", replace(CONFIG, pool="gap_norm", registers=1)),
        ("timm", replace(CONFIG, pool="mae", registers=1)),
        ("timm", replace(CONFIG, pool="cls_dist")),
        ("timm", GATED),
        ("hf", CONFIG),
        ("hf", replace(CONFIG, pool="cls_dist")),
        ("hf", DINOV2),
        ("hf", replace(DINOV2, pool="cls_gap")),
        ("hf", replace(GATED, registers=3)),
        ("npz", CONFIG),
        ("npz", replace(CONFIG, head="tanh")),
        ("npz", replace(CONFIG, pool="gap", channels=1)),
        ("torchvision", replace(CONFIG, head="tanh")),
    ],
)
def test_there_and_back_every_bit_is_kept(tmp_path, to, config, size):
    model = ours(replace(config, img_size=size))
    path = keep(model, tmp_path / "own.safetensors")
    there = convert(path, tmp_path / ("there.npz" if to == "npz" else "there.safetensors"), to=to)
    back = convert(there, tmp_path / "back.safetensors")
    assert load_file(back).keys() == model.state_dict().keys()
    again, card = open_run(back)
    assert identical(model.state_dict(), again.state_dict())
    assert card == open_card(path)


# Ours in their own classes


@torch.no_grad()
@pytest.mark.parametrize(
    ("config", "options"),
    [
        (CONFIG, {}),
        (replace(DINOV2, registers=4), {}),
        (replace(CONFIG, pool="gap"), {}),
        (replace(CONFIG, pool="map"), {}),
        (replace(CONFIG, pool="mae"), {}),
        (replace(CONFIG, pool="gap_norm", registers=1), {"no_embed_class": True}),
        (replace(CONFIG, pool="cls_dist"), {}),
        (GATED, {}),
    ],
    ids=["plain", "DINOv2 with registers", "gap", "map", "MAE", "gap_norm", "distilled DeiT", "gated"],
)
def test_timm_loads_what_is_written_for_it(tmp_path, config, options):
    model = ours(config)
    path = convert(keep(model, tmp_path / "own.safetensors"), tmp_path / "timm.safetensors", to="timm")
    theirs = timm_vit(config, **options)
    theirs.load_state_dict(load_file(path), strict=True)
    assert distance(theirs(images(config)), model(images(config))) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize(
    ("config", "name"),
    [
        (CONFIG, "ViTForImageClassification"),
        (replace(CONFIG, pool="cls_dist"), "DeiTForImageClassificationWithTeacher"),
        (DINOV2, "Dinov2ForImageClassification"),
        (replace(DINOV2, pool="cls_gap"), "Dinov2ForImageClassification"),
        (replace(GATED, pool="cls_gap"), "Dinov2ForImageClassification"),
        (replace(DINOV2, registers=3), "Dinov2WithRegistersForImageClassification"),
        (replace(GATED, registers=3), "Dinov2WithRegistersForImageClassification"),
    ],
    ids=["ViT", "distilled DeiT", "class token", "DINOv2", "gated", "registers", "gated, registers"],
)
def test_transformers_load_what_is_written_for_them(tmp_path, config, name):
    model = ours(config)
    path = convert(keep(model, tmp_path / "own.safetensors"), tmp_path / "there", to="hf")
    transformers = peers.transformers()
    cls = getattr(transformers, name)
    read, report = cls.from_pretrained(path.parent, output_loading_info=True)
    assert not any(report.values()), report
    about = transformers.AutoConfig.from_pretrained(path.parent)
    assert about.architectures == [name]
    assert about.id2label[4] == "class 4"
    strict = cls(about)
    strict.load_state_dict(peers.hf_modules(load_file(path)), strict=True)
    logits = model(images(config))
    for theirs in (read, strict):
        assert distance(theirs.eval()(images(config)).logits, logits) < TOLERANCE
    path.with_suffix(".json").unlink()  # without our card, their own files say as much
    again = load(path.parent)
    reads_average = config.layer_scale > 0  # as all heads of theirs on DINOv2 do, if by zeros
    assert peers.shown(again.config) == replace(config, pool="cls_gap" if reads_average else config.pool)
    assert distance(again(images(config)), logits) < TOLERANCE


@torch.no_grad()
def test_torchvision_loads_what_is_written_for_it(tmp_path):
    model = ours()
    path = convert(keep(model, tmp_path / "own.safetensors"), tmp_path / "there.safetensors", to="torchvision")
    theirs = peers.TorchvisionViT(CONFIG).eval()
    theirs.load_state_dict(load_file(path), strict=True)
    assert distance(theirs(images(CONFIG)), model(images(CONFIG))) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("head", ["tanh", "linear"])
def test_a_jax_file_that_is_written_is_that_of_the_authors(tmp_path, head):
    config = replace(CONFIG, head=head, act="gelu_tanh")
    model = ours(config)
    arrays = dict(np.load(convert(keep(model, tmp_path / "own.safetensors"), tmp_path / "there.npz", to="npz")))
    assert {name: value.shape for name, value in arrays.items()} == {n: v.shape for n, v in jax_arrays(config).items()}
    logits, features = jax_forward(arrays, images(config))
    assert distance(logits, model(images(config))) < TOLERANCE
    assert distance(features, model.embed(images(config))) < TOLERANCE


# What is refused


@pytest.mark.parametrize(
    ("to", "changes", "message"),
    [
        ("hf", {"pool": "gap"}, "pooling 'gap', which hf does not support"),
        ("hf", {"registers": 1}, "registers without LayerScale"),
        ("hf", {"pool": "cls_gap"}, "a head on the patch average without LayerScale"),
        ("hf", {"pool": "cls_dist", "layer_scale": 0.1}, "LayerScale with a distillation token"),
        ("hf", {"act": "swiglu"}, "gated MLPs without LayerScale"),
        ("hf", {"mlp": 100, "layer_scale": 0.1}, "an MLP of 100 for a width of 32"),
        ("npz", {"layer_scale": 0.1}, "LayerScale, which npz"),
        ("npz", {"pool": "cls_dist"}, "pooling 'cls_dist'"),
        ("npz", {"act": "swiglu"}, "gated MLPs"),
        ("timm", {"pos": "sincos2d"}, "positions 'sincos2d', which timm"),
        ("timm", {"stem": "conv"}, "a convolutional stem"),
        ("timm", {"pool": "cls_gap"}, "a head on the class token and the patch average"),
        ("timm", {"pool": "cls_dist", "registers": 1}, "registers with a distillation token"),
        ("torchvision", {"pool": "gap"}, "pooling 'gap'"),
        ("torchvision", {"act": "swiglu"}, "gated MLPs"),
    ],
)
def test_what_a_format_has_no_place_for_is_refused(tmp_path, to, changes, message):
    path = keep(ours(replace(CONFIG, **changes)), tmp_path / "own.safetensors")
    out = tmp_path / ("there.npz" if to == "npz" else "there.safetensors")
    with pytest.raises(UserError, match=message):
        convert(path, out, to=to)
    assert not out.exists()


def test_convert_refuses_wrong_names_and_what_is_there(tmp_path):
    model = ours()
    path = keep(model, tmp_path / "own.safetensors")
    with pytest.raises(UserError, match=r"for npz must be a \.npz file, but got .*x\. Name it x\.npz"):
        convert(path, tmp_path / "x", to="npz")
    with pytest.raises(UserError, match=r"'to' must be one of .*Did you mean 'timm'"):
        convert(path, tmp_path / "x.safetensors", to="tim")
    with pytest.raises(UserError, match="already exists"):
        convert(path, path)
    assert convert(path, path, overwrite=True) == path
    assert identical(load(path).state_dict(), model.state_dict())


@pytest.mark.parametrize(
    ("to", "act", "note"),
    [
        ("timm", "gelu_tanh", "act_layer='gelu_tanh' and norm_layer=partial(nn.LayerNorm, eps=1e-06)"),
        ("npz", "gelu", "The model has act='gelu' and eps=1e-06, but the code for npz computes gelu_tanh with 1e-06"),
        ("npz", "gelu_tanh", None),
    ],
)
def test_what_a_format_does_not_hold_is_said(tmp_path, caplog, to, act, note):
    path = keep(ours(replace(CONFIG, act=act)), tmp_path / "own.safetensors")
    with caplog.at_level("INFO", "vitrail"):
        convert(path, tmp_path / ("it.npz" if to == "npz" else "it.safetensors"), to=to)
    assert note in caplog.text if note else "outputs will differ" not in caplog.text
