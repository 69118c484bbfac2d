"""CLIP's image towers of timm and transformers, both ways."""

from __future__ import annotations

import json
from dataclasses import replace

import peers
import pytest
import torch
from peers import TOLERANCE, distance, identical, images, randomise, timm_features, timm_vit
from safetensors.torch import load_file, save_file

from vitrail.errors import UserError
from vitrail.models.packed import pack
from vitrail.models.vit import ViTConfig
from vitrail.verbs.convert import convert
from vitrail.weights import load, open_card
from vitrail.weights.formats import timm
from vitrail.weights.formats.vit import _HEADS

TOWER = ViTConfig(32, 2, 4, 128, 4, (24, 24), classes=5, stem="clip", act="quick_gelu", eps=1e-5)
BODY = replace(TOWER, classes=0, resample="bicubic_plain")


def clip(whole: bool, **options):
    """A `CLIPModel`, or its image tower, with random weights."""
    vision = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "image_size": 24,
        "patch_size": 4,
    }
    them = peers.transformers()
    if not whole:
        return randomise(them.CLIPVisionModel(them.CLIPVisionConfig(**(vision | options))))
    text = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    about = them.CLIPConfig(vision_config=vision | options, text_config=text | {"vocab_size": 99}, projection_dim=16)
    return randomise(them.CLIPModel(about))


@torch.no_grad()
@pytest.mark.parametrize("act", ["gelu", "quick_gelu"])
def test_timms_tower(tmp_path, act):
    config = replace(TOWER, act=act)
    theirs = timm_vit(config)
    model = load(theirs.state_dict(), model=config)
    assert model.config == config
    x = images(config)
    assert distance(model.embed(x), timm_features(theirs, x)) < TOLERANCE
    assert distance(model(x), theirs(x)) < TOLERANCE
    assert distance(pack(model)(x), model(x)) < TOLERANCE
    save_file(theirs.state_dict(), tmp_path / "theirs.safetensors")
    back = convert(tmp_path / "theirs.safetensors", tmp_path / "back.safetensors", to="timm", model=config)
    assert identical(load_file(back), theirs.state_dict())


@pytest.mark.parametrize(
    ("about", "act"),
    [
        ({"architecture": "vit_base_patch16_clip_224"}, "gelu"),
        ({"architecture": "vit_base_patch16_clip_quickgelu_224"}, "quick_gelu"),
        ({"model_args": {"act_layer": "gelu_tanh", "num_heads": 4}}, "gelu_tanh"),
    ],
)
def test_timms_files_show_the_activation(tmp_path, about, act):
    save_file(timm_vit(TOWER).state_dict(), tmp_path / "model.safetensors")
    pretrained = {"input_size": [3, 24, 24]}
    arguments = {"model_args": {"num_heads": 4}}
    (tmp_path / "config.json").write_text(json.dumps({"pretrained_cfg": pretrained} | arguments | about))
    assert (open_card(tmp_path).config.act, open_card(tmp_path).config.eps) == (act, 1e-5)


def test_openais_weights_in_timm_have_quick_gelu(tmp_path):
    save_file(timm_vit(TOWER).state_dict(), tmp_path / "model.safetensors")
    note = "natively QuickGELU, use quickgelu model variant for original results"
    document = {"pretrained_cfg": {"input_size": [3, 24, 24], "notes": [note]}, "model_args": {"num_heads": 4}}
    (tmp_path / "config.json").write_text(json.dumps(document))
    assert open_card(tmp_path).config.act == "quick_gelu"


@torch.no_grad()
@pytest.mark.parametrize("whole", [True, False], ids=["CLIPModel", "CLIPVisionModel"])
def test_the_tower_of_transformers(tmp_path, whole):
    theirs = clip(whole)
    theirs.save_pretrained(tmp_path / "theirs")
    model = load(tmp_path / "theirs", classes=0) if whole else load(tmp_path / "theirs")
    assert model.config == BODY
    tower = theirs.vision_model if whole else theirs
    expected = tower(images(BODY)).pooler_output
    assert distance(model(images(BODY)), expected) < TOLERANCE
    if whole:
        return
    assert open_card(tmp_path / "theirs").preprocess.mean == (0.48145466, 0.4578275, 0.40821073)
    convert(tmp_path / "theirs", tmp_path / "back", to="hf")
    again = peers.transformers().CLIPVisionModel.from_pretrained(tmp_path / "back").eval()
    assert distance(again(images(BODY)).pooler_output, expected) < TOLERANCE


@torch.no_grad()
def test_state_dicts_and_other_options_of_transformers(tmp_path):
    theirs = clip(False, hidden_act="gelu", layer_norm_eps=1e-4)
    theirs.save_pretrained(tmp_path)
    expected = theirs(images(BODY)).pooler_output
    assert distance(load(tmp_path)(images(BODY)), expected) < TOLERANCE
    theirs = clip(False)
    assert distance(load(theirs.state_dict(), BODY)(images(BODY)), theirs(images(BODY)).pooler_output) < TOLERANCE


def test_heads_that_vitrail_or_transformers_lack_are_refused(tmp_path):
    them = peers.transformers()
    about = clip(True).config
    with pytest.raises(UserError, match="averages tokens before the final norm"):
        load(them.CLIPForImageClassification(about).state_dict(), BODY)
    save_file(timm_vit(TOWER).state_dict(), tmp_path / "theirs.safetensors")
    with pytest.raises(UserError, match="a classification head on CLIP's image tower, which hf does not support"):
        convert(tmp_path / "theirs.safetensors", tmp_path / "hf", to="hf", model=TOWER)
    with pytest.raises(UserError, match="CLIP's stem, which npz does not support"):
        convert(tmp_path / "theirs.safetensors", tmp_path / "it.npz", to="npz", model=TOWER)


def test_siglips_towers_have_the_heads_and_activation_of_timm():
    """Tensors show neither, and timm's `config.json` only the name of the architecture."""
    names = peers.timm().list_models("vit_*_siglip_*")
    assert len(names) > 20
    for name in names:
        with torch.device("meta"):
            theirs = peers.timm().create_model(name, depth=1)
        block, said = theirs.blocks[0], timm.architecture_fields(name)
        assert said.get("act", "gelu") == {"GELU": "gelu", "GELUTanh": "gelu_tanh"}[type(block.mlp.act).__name__], name
        assert said.get("heads", _HEADS[theirs.embed_dim]) == block.attn.num_heads, name
