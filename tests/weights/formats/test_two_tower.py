"""CLIP and SigLIP as a whole: transformers and the layouts of OpenAI and open_clip, both ways."""

from __future__ import annotations

import json
from dataclasses import replace

import peers
import pytest
import torch
from peers import TOLERANCE, distance, identical, images, randomise
from safetensors.torch import load_file, save_file

from vitrail.data.preprocess import Preprocess
from vitrail.errors import UserError
from vitrail.models import build
from vitrail.models.text import TextConfig
from vitrail.models.two_tower import TwoTowerConfig, clip, siglip
from vitrail.models.vit import ViTConfig
from vitrail.tasks import Multiclass, Pairs
from vitrail.tokenizers import Tokenizer
from vitrail.verbs.convert import convert
from vitrail.weights import Card, load, open_card, open_run, start_from
from vitrail.weights.writing import write_weights

VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "image_size": 24,
    "patch_size": 4,
}
TEXT = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 99,
    "max_position_embeddings": 12,
}
TOWER = ViTConfig(32, 2, 4, 128, 4, (24, 24), classes=0)
IDS = torch.randint(1, 97, (3, 12), generator=torch.Generator().manual_seed(0))
IDS[:, 0], IDS[:, 7] = 97, 98  # start and end; what follows the end is padding to CLIP


def theirs(kind: str, image_act: str | None = None, text_act: str | None = None):
    """A model of transformers, with the activations of its towers if they are not the usual ones."""
    them = peers.transformers()
    vision, words = (
        content | ({"hidden_act": act} if act else {}) for content, act in ((VISION, image_act), (TEXT, text_act))
    )
    if kind == "clip":
        text = words | {"bos_token_id": 97, "eos_token_id": 98}
        about = them.CLIPConfig(vision_config=vision, text_config=text, projection_dim=20)
        return randomise(them.CLIPModel(about))
    text = words | {"hidden_size": 32, "num_attention_heads": 4, "projection_size": 32}
    return randomise(them.SiglipModel(them.SiglipConfig(vision_config=vision, text_config=text)))


@torch.no_grad()
def outputs(model, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    said = model(input_ids=IDS, pixel_values=x)
    return said.image_embeds, said.text_embeds, said.logits_per_image


@torch.no_grad()
def same(model, expected, x) -> bool:
    joint, texts = model(x), model.embed_text(IDS)
    logits = model.match(joint, texts)
    return all(distance(a, b) < TOLERANCE for a, b in zip((joint, texts, logits), expected, strict=True))


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_transformers_both_ways(tmp_path, kind):
    them, x = theirs(kind), images(TOWER)
    expected = outputs(them, x)
    them.save_pretrained(tmp_path / "theirs")
    model = load(tmp_path / "theirs")
    assert isinstance(model.config, TwoTowerConfig)
    assert model.config.image.act == model.config.text.act == ("quick_gelu" if kind == "clip" else "gelu_tanh")
    assert same(model, expected, x)
    convert(tmp_path / "theirs", tmp_path / "back", to="hf")
    again = type(them).from_pretrained(tmp_path / "back").eval()
    for ours, right in zip(outputs(again, x), expected, strict=True):
        assert distance(ours, right) < TOLERANCE
    convert(tmp_path / "theirs", tmp_path / "own.safetensors", to="vitrail")
    assert same(load(tmp_path / "own.safetensors"), expected, x)


def original(state: dict[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    """transformers' tensors in the layout of OpenAI's CLIP, or of open_clip's SigLIP, written out by hand."""

    def block(prefix: str, old: str, timm: bool = False) -> dict[str, torch.Tensor]:
        qkv = {
            part: torch.cat([state[f"{old}.self_attn.{x}_proj.{part}"] for x in "qkv"]) for part in ("weight", "bias")
        }
        names = (
            {"norm1": "layer_norm1", "norm2": "layer_norm2", "attn.proj": "self_attn.out_proj"}
            | {"mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"}
            if timm
            else {"ln_1": "layer_norm1", "ln_2": "layer_norm2", "attn.out_proj": "self_attn.out_proj"}
            | {"mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2"}
        )
        found = {f"{prefix}.{a}.{k}": state[f"{old}.{b}.{k}"] for a, b in names.items() for k in ("weight", "bias")}
        fused = "attn.qkv.{}" if timm else "attn.in_proj_{}"
        return found | {f"{prefix}.{fused.format(part)}": value for part, value in qkv.items()}

    v, t = "vision_model", "text_model"
    words = {
        "token_embedding.weight": state[f"{t}.embeddings.token_embedding.weight"],
        "positional_embedding": state[f"{t}.embeddings.position_embedding.weight"],
        **{f"ln_final.{k}": state[f"{t}.final_layer_norm.{k}"] for k in ("weight", "bias")},
    }
    for i in range(2):
        words |= block(f"transformer.resblocks.{i}", f"{t}.encoder.layers.{i}")
    if kind == "clip":
        seen = {
            "visual.class_embedding": state[f"{v}.embeddings.class_embedding"],
            "visual.positional_embedding": state[f"{v}.embeddings.position_embedding.weight"],
            "visual.conv1.weight": state[f"{v}.embeddings.patch_embedding.weight"],
            "visual.proj": state["visual_projection.weight"].T,
            "text_projection": state["text_projection.weight"].T,
            "logit_scale": state["logit_scale"],
        }
        for a, b in (("ln_pre", "pre_layrnorm"), ("ln_post", "post_layernorm")):
            seen |= {f"visual.{a}.{k}": state[f"{v}.{b}.{k}"] for k in ("weight", "bias")}
        for i in range(2):
            seen |= block(f"visual.transformer.resblocks.{i}", f"{v}.encoder.layers.{i}")
        return seen | words
    trunk = {
        "pos_embed": state[f"{v}.embeddings.position_embedding.weight"][None],
        "attn_pool.latent": state[f"{v}.head.probe"],
    }
    modules = {
        "patch_embed.proj": "embeddings.patch_embedding",
        "norm": "post_layernorm",
        "attn_pool.proj": "head.attention.out_proj",
        "attn_pool.norm": "head.layernorm",
        "attn_pool.mlp.fc1": "head.mlp.fc1",
        "attn_pool.mlp.fc2": "head.mlp.fc2",
    }
    for k in ("weight", "bias"):
        trunk |= {f"{a}.{k}": state[f"{v}.{b}.{k}"] for a, b in modules.items()}
        whole = state[f"{v}.head.attention.in_proj_{k}"]
        trunk |= {f"attn_pool.q.{k}": whole[:32], f"attn_pool.kv.{k}": whole[32:]}
    for i in range(2):
        trunk |= block(f"blocks.{i}", f"{v}.encoder.layers.{i}", timm=True)
    words |= {f"text_projection.{k}": state[f"{t}.head.{k}"] for k in ("weight", "bias")}
    both = {f"visual.trunk.{n}": value for n, value in trunk.items()} | {f"text.{n}": w for n, w in words.items()}
    return both | {name: state[name].reshape(()) for name in ("logit_scale", "logit_bias")}


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_each_tower_has_its_activation(tmp_path, kind):
    them, x = theirs(kind, image_act="gelu"), images(TOWER)
    them.save_pretrained(tmp_path)
    assert same(load(tmp_path), outputs(them, x), x)


@pytest.mark.parametrize(
    ("kind", "text_act", "tower", "image_act"),
    [
        ("clip", "quick_gelu", None, "quick_gelu"),
        ("siglip", "gelu", "vit_base_patch16_siglip_224", "gelu"),
        ("siglip", "gelu_pytorch_tanh", "vit_base_patch16_siglip_224", "gelu"),  # SigLIP 2
        ("siglip", "gelu_pytorch_tanh", "vit_base_patch32_siglip_256", "gelu_pytorch_tanh"),
    ],
)
def test_the_layouts_of_openai_and_open_clip_both_ways(tmp_path, kind, text_act, tower, image_act):
    them, x = theirs(kind, image_act, text_act), images(TOWER)
    layout = {name: value.contiguous() for name, value in original(them.state_dict(), kind).items()}
    save_file(layout, tmp_path / "open_clip_model.safetensors")
    about = {"quick_gelu": kind == "clip", "vision_cfg": {"width": 32, "head_width": 8, "image_size": 24}}
    text = {"width": 16, "heads": 2} if kind == "clip" else {"heads": 4}
    if tower:
        about["vision_cfg"] = {"timm_model_name": tower, "image_size": 24}
    if text_act == "gelu_pytorch_tanh":
        text["act_kwargs"] = {"approximate": "tanh"}
    document = {"model_cfg": about | {"text_cfg": text}, "preprocess_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(document))
    known = None if kind == "clip" else small_siglip()
    model = load(tmp_path / "open_clip_model.safetensors", model=known)
    assert same(model, outputs(them, x), x)
    back = convert(tmp_path / "open_clip_model.safetensors", tmp_path / "b.safetensors", to="original", model=known)
    assert identical(load_file(back), layout)


OPEN_CLIP = {
    "clip": {"layers": 2, "width": 64, "head_width": 32, "patch_size": 8, "image_size": 24},
    "siglip": {"timm_model_name": "vit_base_patch16_siglip_224", "timm_pool": "map", "timm_proj": "none"},
}


@torch.no_grad()
@pytest.mark.parametrize(("kind", "quick_gelu"), [("clip", False), ("clip", True), ("siglip", False)])
def test_open_clips_own_models_both_ways(tmp_path, kind, quick_gelu):
    """SigLIP is version 2, with the tanh approximation in the text tower alone."""
    text = {"context_length": 12, "vocab_size": 99, "width": 64, "heads": 2, "layers": 2}
    about = {"embed_dim": 48, "vision_cfg": OPEN_CLIP[kind], "text_cfg": text}
    if kind == "clip":
        them = peers.open_clip().CLIP(**about, quick_gelu=quick_gelu)
        about["quick_gelu"] = quick_gelu
    else:
        text |= {"no_causal_mask": True, "proj_bias": True, "pool_type": "last", "norm_kwargs": {"eps": 1e-6}}
        text |= {"act_kwargs": {"approximate": "tanh"}}
        about["embed_dim"] = 768
        about["vision_cfg"] = OPEN_CLIP[kind] | {"image_size": 32}
        them = peers.open_clip().CustomTextCLIP(**about, init_logit_bias=-10)
    randomise(them)
    state = {name: value.contiguous() for name, value in them.state_dict().items()}
    save_file(state, tmp_path / "open_clip_model.safetensors")
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": about, "preprocess_cfg": {}}))
    model = load(tmp_path / "open_clip_model.safetensors")
    x = torch.randn(2, 3, *model.config.image.img_size, generator=torch.Generator().manual_seed(1))
    assert distance(model(x), them.encode_image(x, normalize=True)) < TOLERANCE
    assert distance(model.embed_text(IDS), them.encode_text(IDS, normalize=True)) < TOLERANCE
    back = convert(tmp_path / "open_clip_model.safetensors", tmp_path / "back.safetensors", to="original")
    assert identical(load_file(back), state)


def small_siglip() -> TwoTowerConfig:
    text = TextConfig(32, 2, 4, 48, 99, 12, causal=False, pool="last", act="gelu_tanh")
    return TwoTowerConfig(replace(TOWER, pool="map", act="gelu_tanh"), text, 32, project=False)


def test_clips_words_come_with_its_weights(tmp_path):
    """A vocabulary of CLIP's size is CLIP's; any other is not known."""
    config = clip(replace(TOWER, stem="clip", act="quick_gelu", eps=1e-5), 64, 16)
    state = build(config).state_dict()
    save_file(state, tmp_path / "model.safetensors")
    model, card = open_run(tmp_path / "model.safetensors", model=config)
    assert card.task.words()(["a photo of a cat"]).shape == (1, 16)
    classifier, task = card.task.classifier(model, ("cat", "dog"))
    assert classifier(images(TOWER)).shape == (len(images(TOWER)), 2)
    assert task == Multiclass(("cat", "dog"))
    theirs("siglip").save_pretrained(tmp_path / "siglip")
    with pytest.raises(UserError, match="vocabulary of these weights is not known"):
        open_run(tmp_path / "siglip")[1].task.words()(["a cat"])


@torch.no_grad()
def test_a_classifier_starts_from_the_image_tower(tmp_path):
    them = theirs("clip")
    them.save_pretrained(tmp_path)
    tower = open_card(tmp_path).config.image
    model = build(replace(tower, classes=3))
    notes = start_from(tmp_path, model, Multiclass(("a", "b", "c")))
    assert "left out the text tower" in notes
    x = images(TOWER)
    assert distance(model.embed(x), them.vision_model(x).pooler_output) < TOLERANCE


def test_towers_that_others_do_not_have_stay_here(tmp_path):
    config = siglip(replace(TOWER, pool="map", registers=2), 99, 12)
    card, model = card_of(config), build(config)
    with pytest.raises(UserError, match="an image tower that is no plain ViT"):
        write_weights(tmp_path / "m.safetensors", model, card, "hf")


def card_of(config: TwoTowerConfig) -> Card:
    task = Pairs((), Tokenizer("unknown"), 12, config.classes)
    return Card(model="pairs", config=config, task=task, preprocess=Preprocess((24, 24), 3))
