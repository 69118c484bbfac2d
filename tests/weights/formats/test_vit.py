"""Weights of the peers' own classes give their numbers here: features and logits."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import peers
import pytest
import torch
from peers import (
    TOLERANCE,
    distance,
    hf_vit,
    identical,
    images,
    jax_arrays,
    jax_forward,
    randomise,
    timm_features,
    timm_vit,
)
from safetensors.torch import save_file

from vitrail.data.preprocess import Preprocess
from vitrail.errors import UserError
from vitrail.models import CONFIGS, build
from vitrail.models.vit import ViTConfig
from vitrail.tasks import Multiclass
from vitrail.verbs.convert import convert
from vitrail.weights import load, open_card, open_run, recognise, start_from
from vitrail.weights.tensors import from_state_dict

CONFIG = ViTConfig(width=32, depth=2, heads=4, mlp=128, patch=4, img_size=(24, 24), classes=5)
DINOV2 = replace(CONFIG, layer_scale=1e-5)
GATED = replace(DINOV2, act="swiglu", mlp=88)  # what transformers works out from a ratio of 4

# timm, and those with its names


@torch.no_grad()
@pytest.mark.parametrize(
    ("config", "options"),
    [
        (CONFIG, {}),
        (CONFIG, {"no_embed_class": True}),
        (replace(CONFIG, pool="cls_dist"), {}),
        (replace(CONFIG, pool="gap"), {}),
        (replace(CONFIG, pool="map"), {}),
        (replace(CONFIG, pool="mae"), {}),
        (replace(CONFIG, pool="mae", registers=2), {}),
        (replace(CONFIG, pool="gap_norm"), {}),
        (replace(CONFIG, pool="gap_norm", registers=4), {"no_embed_class": True}),
        (replace(CONFIG, registers=3), {}),
        (DINOV2, {}),
        (replace(DINOV2, registers=4), {"no_embed_class": True}),
        (GATED, {}),
        (replace(GATED, registers=4), {"no_embed_class": True}),
    ],
    ids=[
        "plain",
        "DeiT III",
        "distilled DeiT",
        "gap",
        "map",
        "MAE",
        "MAE, registers",
        "gap_norm",
        "gap_norm, registers",
        "registers",
        "DINOv2",
        "DINOv2 with registers",
        "gated",
        "gated, registers",
    ],
)
def test_timm(config, options):
    theirs = timm_vit(config, **options)
    model = load(theirs.state_dict(), model=config)
    assert model.config == config
    x = images(config)
    assert distance(model.embed(x), timm_features(theirs, x)) < TOLERANCE
    assert distance(model(x), theirs(x)) < TOLERANCE


@pytest.mark.parametrize("name", [name for name in CONFIGS if re.match(r"(vit|deit3?|dinov2)_(?!nano)", name)])
def test_the_width_of_a_published_vit_tells_its_heads(name):
    with torch.device("meta"):
        state = build(replace(CONFIGS[name], depth=1)).state_dict()
    found = recognise.architecture(recognise.recognise(from_state_dict(state, "it"), "it"), recognise.Sidecar(), None)
    assert (found.width, found.heads) == (CONFIGS[name].width, CONFIGS[name].heads)


@torch.no_grad()
def test_deit3_of_its_authors_keeps_its_positions_where_it_is_asked_for():
    config = replace(DINOV2, pos="patches")
    theirs = timm_vit(config, no_embed_class=True)
    files = {re.sub(r"ls(\d)\.gamma", r"gamma_\1", name): value for name, value in theirs.state_dict().items()}
    read = peers.timm("timm.models.vision_transformer").checkpoint_filter_fn
    assert identical(read({"model": files}, theirs, adapt_layer_scale=True), theirs.state_dict())
    model = load({"model": files}, model=config)
    assert peers.shown(model.config) == config
    assert distance(model(images(config)), theirs(images(config))) < TOLERANCE
    fresh = build(config)
    start_from({"model": files}, fresh, Multiclass(tuple("01234")))
    assert identical(fresh.state_dict(), model.state_dict())


@torch.no_grad()
def test_both_heads_of_a_distilled_deit_are_those_of_timm():
    theirs = timm_vit(replace(CONFIG, pool="cls_dist"))
    model = load(theirs.state_dict(), model=CONFIG)
    theirs.set_distilled_training(True)
    theirs.training = True  # which is what makes it give both
    for ours, expected in zip(model.heads(images(CONFIG)), theirs(images(CONFIG)), strict=True):
        assert distance(ours, expected) < TOLERANCE


@torch.no_grad()
def test_a_distilled_deit_for_other_classes_gets_two_new_heads():
    theirs = timm_vit(replace(CONFIG, pool="cls_dist"))
    model = load(theirs.state_dict(), model=CONFIG, classes=3)
    assert distance(model.embed(images(CONFIG)), timm_features(theirs, images(CONFIG))) < TOLERANCE
    assert model.head.weight.shape == model.head_dist.weight.shape == (3, 32)
    assert not model.head.weight.any()
    assert not model.head_dist.weight.any()


@torch.no_grad()
def test_the_names_of_dinov2s_authors():
    """Their files: registers and gated MLPs have other names, and a linear head reads the average too."""
    config = replace(GATED, pool="cls_gap", registers=4)
    model = randomise(build(config))
    table = {"reg_token": "register_tokens", "mlp.fc1": "mlp.w12", "mlp.fc2": "mlp.w3"}
    theirs = {"backbone.mask_token": torch.zeros(1, 32)}
    for name, value in model.state_dict().items():
        for old, new in table.items():
            name = name.replace(old, new)
        theirs[name.replace("head.", "linear_head.") if name.startswith("head.") else f"backbone.{name}"] = value
    again = load(theirs, config)
    assert again.config == config
    assert peers.identical(again.state_dict(), model.state_dict())


@torch.no_grad()
@pytest.mark.parametrize(
    ("wrap", "extra"),
    [
        (lambda state: {"model": state, "epoch": 3}, {}),
        (lambda state: {"state_dict": {f"module.{name}": value for name, value in state.items()}}, {}),
        (lambda state: {"model": {"x": torch.zeros(1)}, "model_ema": state}, {}),
        (lambda state: {"state_dict": {}, "state_dict_ema": state}, {}),
        (lambda state: {"teacher": {f"module.backbone.{n}": v for n, v in state.items()}}, {}),
        (lambda state: {"model": state}, {"mask_token": torch.zeros(1, 1, 32), "decoder_embed.weight": torch.zeros(2)}),
    ],
    ids=["model", "module", "model_ema", "state_dict_ema", "teacher", "MAE"],
)
def test_wrappings_are_opened(tmp_path, wrap, extra):
    theirs = timm_vit(CONFIG)
    torch.save(wrap(theirs.state_dict() | extra), tmp_path / "model.pth")
    model = load(tmp_path / "model.pth", CONFIG)
    assert distance(model(images(CONFIG)), theirs(images(CONFIG))) < TOLERANCE


@torch.no_grad()
def test_a_body_without_a_head_is_a_model_without_a_head(tmp_path):
    theirs = timm_vit(DINOV2)
    theirs.reset_classifier(0)  # as DINOv2's files are
    heads = {"module.head.mlp.0.weight": torch.zeros(3, 3), "module.head.last_layer.weight_g": torch.zeros(3, 1)}
    body = {f"module.backbone.{name}": value for name, value in theirs.state_dict().items()}
    torch.save({"teacher": body | heads}, tmp_path / "dino.pth")
    body = load(tmp_path / "dino.pth", CONFIG)
    assert body.config.classes == 0
    assert distance(body(images(CONFIG)), theirs(images(CONFIG))) < TOLERANCE
    with pytest.raises(UserError, match=r"has no classification head\. Add a new one with classes=N"):
        open_run(tmp_path / "dino.pth", model=CONFIG)
    model, card = open_run(tmp_path / "dino.pth", model=CONFIG, classes=("cat", "dog"))
    assert distance(model.embed(images(CONFIG)), theirs(images(CONFIG))) < TOLERANCE
    assert card.classes == ("cat", "dog")
    assert card.preprocess.mean == (0.485, 0.456, 0.406)


def test_a_config_of_timm_says_heads_size_and_preprocessing(tmp_path):
    config = replace(CONFIG, heads=2, img_size=(16, 32))
    save_file(timm_vit(config).state_dict(), tmp_path / "model.safetensors")
    about = {"input_size": [3, 224, 224], "mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "crop_pct": 0.95}
    document = {"pretrained_cfg": about, "model_args": {"num_heads": 2, "img_size": [16, 32]}}
    (tmp_path / "config.json").write_text(json.dumps(document))
    card = open_card(tmp_path)
    assert card.config == config
    assert card.preprocess == Preprocess((16, 32), 3, 0.95, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))


# Hugging Face


@torch.no_grad()
@pytest.mark.parametrize("saved", [True, False], ids=["file", "modules"])
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("ViTForImageClassification", CONFIG),
        ("DeiTForImageClassification", replace(CONFIG, registers=1)),
        ("DeiTForImageClassificationWithTeacher", replace(CONFIG, pool="cls_dist")),
        ("Dinov2ForImageClassification", replace(DINOV2, pool="cls_gap")),
        ("Dinov2ForImageClassification", replace(GATED, pool="cls_gap")),
        ("Dinov2WithRegistersForImageClassification", replace(DINOV2, pool="cls_gap", registers=3)),
    ],
    ids=["ViT", "DeiT", "distilled DeiT", "DINOv2", "gated", "registers"],
)
def test_hugging_faces_classifiers(tmp_path, name, config, saved):
    theirs = hf_vit(name, config)
    if saved:
        theirs.save_pretrained(tmp_path)
    model = load(tmp_path if saved else theirs.state_dict(), None if saved else config)
    assert peers.shown(model.config) == config
    answer = theirs(images(config))
    assert distance(model(images(config)), answer.logits) < TOLERANCE
    if config.pool == "cls_dist":
        ours, distilled = model.heads(images(config))
        assert distance(ours, answer.cls_logits) < TOLERANCE
        assert distance(distilled, answer.distillation_logits) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("saved", [True, False], ids=["file", "modules"])
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("ViTModel", CONFIG),
        ("ViTMAEModel", CONFIG),
        ("DeiTModel", CONFIG),
        ("Dinov2Model", DINOV2),
        ("Dinov2Model", GATED),
        ("Dinov2WithRegistersModel", replace(DINOV2, registers=4)),
    ],
    ids=["ViT", "MAE", "DeiT", "DINOv2", "gated", "registers"],
)
def test_hugging_faces_models_without_a_head(tmp_path, name, config, saved):
    theirs = hf_vit(name, config, **({"mask_ratio": 0.0} if name == "ViTMAEModel" else {}))
    if saved:
        theirs.save_pretrained(tmp_path)
    model = load(tmp_path if saved else theirs.state_dict(), None if saved else config, classes=7)
    answer = theirs(images(config))
    tokens = answer.last_hidden_state
    features = tokens[:, :2].mean(1) if name == "DeiTModel" else tokens[:, 0]
    assert distance(model.embed(images(config)), features) < TOLERANCE
    if name == "ViTModel":
        hidden = torch.tanh(model.pre_logits(model.embed(images(config))))
        assert distance(hidden, answer.pooler_output) < TOLERANCE


@torch.no_grad()
def test_a_body_can_be_asked_for_a_head_that_reads_the_average_too():
    theirs = hf_vit("Dinov2Model", DINOV2)
    model = load(theirs.state_dict(), replace(DINOV2, pool="cls_gap"), classes=3)
    tokens = theirs(images(DINOV2)).last_hidden_state
    expected = torch.cat([tokens[:, 0], tokens[:, 1:].mean(1)], dim=1)
    assert distance(model.embed(images(DINOV2)), expected) < TOLERANCE
    assert model.head.weight.shape == (3, 64)


def test_hugging_faces_files_say_classes_and_preprocessing(tmp_path):
    labels = {i: f"thing {i}" for i in range(5)}
    hf_vit("ViTForImageClassification", CONFIG, id2label=labels).save_pretrained(tmp_path)
    processor = {"image_mean": [0.1] * 3, "image_std": [0.2] * 3, "do_center_crop": True, "crop_size": 24}
    processor |= {"resample": 2}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor | {"size": {"shortest_edge": 30}}))
    card = open_card(tmp_path)
    assert card.classes == tuple(labels.values())
    assert card.preprocess == Preprocess((24, 24), 3, 0.8, (0.1,) * 3, (0.2,) * 3, interpolation="bilinear")


@torch.no_grad()
@pytest.mark.parametrize("act", ["gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu"])
@pytest.mark.parametrize("eps", [1e-12, 1e-3])
def test_activation_and_epsilon_of_hugging_face_are_kept(tmp_path, act, eps):
    theirs = hf_vit("ViTForImageClassification", CONFIG, hidden_act=act, layer_norm_eps=eps)
    theirs.save_pretrained(tmp_path / "theirs")
    model = load(tmp_path / "theirs")
    assert distance(model(images(CONFIG)), theirs(images(CONFIG)).logits) < TOLERANCE
    convert(tmp_path / "theirs", tmp_path / "back", to="hf")
    again = type(theirs).from_pretrained(tmp_path / "back").eval()
    assert distance(again(images(CONFIG)).logits, theirs(images(CONFIG)).logits) < TOLERANCE


def test_an_unknown_activation_is_refused(tmp_path):
    hf_vit("ViTForImageClassification", CONFIG, hidden_act="relu").save_pretrained(tmp_path)
    with pytest.raises(UserError, match="Its activation is 'relu', but a ViT of vitrail has gelu"):
        load(tmp_path)


# JAX and torchvision, laid out by hand


@torch.no_grad()
@pytest.mark.parametrize("head", ["tanh", "linear"])
@pytest.mark.parametrize("prefix", ["", "opt/target/"])
def test_jax(tmp_path, head, prefix):
    config = replace(CONFIG, head=head)
    arrays = jax_arrays(config)
    np.savez(tmp_path / "ViT.npz", **{prefix + name: value for name, value in arrays.items()})
    model, card = open_run(tmp_path / "ViT.npz")  # this format shows the heads
    assert peers.shown(model.config) == config
    assert (card.preprocess.mean, card.preprocess.std) == ((0.5,), (0.5,))
    logits, features = jax_forward(arrays, images(config))
    assert distance(model.embed(images(config)), features) < TOLERANCE
    assert distance(model(images(config)), logits) < TOLERANCE


def test_big_vision_has_other_numbers_in_its_names(tmp_path):
    arrays = jax_arrays(CONFIG)
    table = {"MlpBlock_3": "MlpBlock_0", "LayerNorm_2": "LayerNorm_1", "Attention_1": "Attention_0"}
    renamed = {}
    for name, value in arrays.items():
        for old, new in table.items():
            name = name.replace(old, new)
        renamed["params/" + name.replace("Transformer/posembed_input/", "")] = value
    np.savez(tmp_path / "theirs.npz", **arrays)
    np.savez(tmp_path / "big.npz", **renamed)
    one, other = (load(tmp_path / name).state_dict() for name in ("theirs.npz", "big.npz"))
    assert peers.identical(one, other)


@torch.no_grad()
@pytest.mark.parametrize("old", [True, False], ids=["old", "new"])
def test_torchvision(old):
    theirs = randomise(peers.TorchvisionViT(CONFIG))
    state = theirs.state_dict()
    if old:
        state = {n.replace("mlp.0", "mlp.linear_1").replace("mlp.3", "mlp.linear_2"): v for n, v in state.items()}
    model = load(state, CONFIG)
    assert distance(model.embed(images(CONFIG)), theirs.features(images(CONFIG))) < TOLERANCE
    assert distance(model(images(CONFIG)), theirs(images(CONFIG))) < TOLERANCE
