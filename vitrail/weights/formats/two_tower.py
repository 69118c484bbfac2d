"""CLIP and SigLIP as a whole: transformers' `CLIPModel` and `SiglipModel`, and the layouts of OpenAI and open_clip.

open_clip's SigLIP has an image tower of timm (`visual.trunk`) and its text tower under `text`. What tensors do not
show, such as QuickGELU, is in `config.json` of transformers or `open_clip_config.json`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vitrail.models.layers import Activation
from vitrail.models.text import TextConfig
from vitrail.models.two_tower import TwoTowerConfig
from vitrail.models.vit import ViTConfig
from vitrail.weights.formats import Format, FormatSpec, clip, hf, identity, tensor_shape, timm, vit
from vitrail.weights.key_tables import count_blocks, fuse, inverse, key_table, rename, split_qkv
from vitrail.weights.sidecar import Sidecar

_TEXT_TOP = {
    "token_embed": "embeddings.token_embedding",
    "pos_embed": "embeddings.position_embedding.weight",
    "norm": "final_layer_norm",
}
_ORIGINAL_IMAGE = {
    "cls_token": "class_embedding",
    "pos_embed": "positional_embedding",
    "patch_embed.proj": "conv1",
    "norm_pre": "ln_pre",
    "norm": "ln_post",
}
_ORIGINAL_TEXT = {"token_embed": "token_embedding", "pos_embed": "positional_embedding", "norm": "ln_final"}
_ORIGINAL_BLOCK = {
    "norm1": "ln_1",
    "attn.qkv.weight": "attn.in_proj_weight",
    "attn.qkv.bias": "attn.in_proj_bias",
    "attn.proj": "attn.out_proj",
    "norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
}
_ORIGINAL_WHERE = "transformer.resblocks.{}."
_POOL = {"norm": "head.layernorm", "mlp.fc1": "head.mlp.fc1", "mlp.fc2": "head.mlp.fc2"}
_POOL |= {"proj": "head.attention.out_proj", "latent": "head.probe"}
_POOL_PREFIX = "attn_pool."


def read_hf(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """transformers' tensors under our names."""
    vision, text = _below(tensors, "vision_model."), _below(tensors, "text_model.")
    for part in (vision, text):
        part.pop("embeddings.position_ids", None)  # indices, in files of older versions
    image = clip.read(vision) if "embeddings.class_embedding" in vision else _read_siglip_tower(vision)
    depth = count_blocks(text, r"encoder\.layers\.(\d+)\.")
    words = fuse(rename(text, inverse(key_table(depth, _TEXT_TOP, clip.BLOCK, clip.WHERE))))
    words["pos_embed"] = words["pos_embed"].unsqueeze(0)
    state = {f"image.{name}": value for name, value in image.items()}
    state |= {f"text.{name}": value for name, value in words.items() if not name.startswith("head.")}
    state |= {f"text_proj.{kind}": words[f"head.{kind}"] for kind in ("weight", "bias") if f"head.{kind}" in words}
    named = {"visual_projection.weight": "image_proj.weight", "text_projection.weight": "text_proj.weight"}
    state |= {ours: tensors[theirs] for theirs, ours in named.items() if theirs in tensors}
    return state | _logits(tensors, (1,))


def write_hf(state: Mapping[str, Tensor], config: TwoTowerConfig) -> dict[str, Tensor]:
    """Our tensors under transformers' names."""
    image, text = _below(state, "image."), split_qkv(_below(state, "text."))
    text["pos_embed"] = text["pos_embed"][0]
    tower: Any = config.image
    vision = clip.write(image, tower) if config.project else _write_siglip_tower(image, tower)
    named = rename(text, key_table(config.text.depth, _TEXT_TOP, clip.BLOCK, clip.WHERE))
    theirs = vision | {f"text_model.{name}": value for name, value in named.items()}
    if config.project:
        theirs["visual_projection.weight"] = state["image_proj.weight"]
        return theirs | {"text_projection.weight": state["text_proj.weight"]} | _logits(state, ())
    theirs |= {f"text_model.head.{kind}": state[f"text_proj.{kind}"] for kind in ("weight", "bias")}
    return theirs | _logits(state, (1,))


def read_original(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of OpenAI and open_clip under our names."""
    nested = "text.token_embedding.weight" in tensors
    words = _below(tensors, "text.") if nested else {n: tensors[n] for n in tensors if not n.startswith("visual.")}
    projection = words.pop("text_projection", None)
    state: dict[str, Tensor] = {}
    if any(name.startswith("visual.trunk.") for name in tensors):
        image = _below(tensors, "visual.trunk.")
        if "visual.head.proj.weight" in tensors:
            state["image_proj.weight"] = tensors["visual.head.proj.weight"]
    else:
        visual = _below(tensors, "visual.")
        state["image_proj.weight"] = visual.pop("proj").T
        depth = count_blocks(visual, r"transformer\.resblocks\.(\d+)\.")
        image = rename(visual, inverse(key_table(depth, _ORIGINAL_IMAGE, _ORIGINAL_BLOCK, _ORIGINAL_WHERE)))
        image["cls_token"] = image["cls_token"].reshape(1, 1, -1)
        image["pos_embed"] = image["pos_embed"].unsqueeze(0)
    depth = count_blocks(words, r"transformer\.resblocks\.(\d+)\.")
    table = inverse(key_table(depth, _ORIGINAL_TEXT, _ORIGINAL_BLOCK, _ORIGINAL_WHERE))
    text = rename({n: v for n, v in words.items() if n.startswith(("transformer.", *_ORIGINAL_TEXT.values()))}, table)
    text["pos_embed"] = text["pos_embed"].unsqueeze(0)
    if projection is not None:
        state["text_proj.weight"] = projection.T
    state |= {f"text_proj.{k}": words[n] for k in ("weight", "bias") if (n := f"text_projection.{k}") in words}
    state |= {f"image.{name}": value for name, value in image.items()}
    state |= {f"text.{name}": value for name, value in text.items()}
    return state | _logits(tensors, (1,))


def write_original(state: Mapping[str, Tensor], config: TwoTowerConfig) -> dict[str, Tensor]:
    """Our tensors as OpenAI and open_clip name them."""
    image, text = _below(state, "image."), _below(state, "text.")
    text["pos_embed"] = text["pos_embed"][0]
    table = key_table(config.text.depth, _ORIGINAL_TEXT, _ORIGINAL_BLOCK, _ORIGINAL_WHERE)
    words = rename(text, table)
    if not config.project:
        theirs = {f"visual.trunk.{name}": value for name, value in image.items()}
        theirs |= {f"text.{name}": value for name, value in words.items()}
        theirs |= {f"text.text_projection.{kind}": state[f"text_proj.{kind}"] for kind in ("weight", "bias")}
        return theirs | _logits(state, ())
    tower: Any = config.image
    image["cls_token"], image["pos_embed"] = image["cls_token"].flatten(), image["pos_embed"][0]
    named = rename(image, key_table(tower.depth, _ORIGINAL_IMAGE, _ORIGINAL_BLOCK, _ORIGINAL_WHERE))
    theirs = {f"visual.{name}": value for name, value in named.items()} | words
    theirs |= {"visual.proj": state["image_proj.weight"].T, "text_projection": state["text_proj.weight"].T}
    return theirs | _logits(state, ())


def unsupported(config: TwoTowerConfig) -> str | None:
    """The feature of a model that neither format can represent."""
    tower = config.image
    if not isinstance(tower, ViTConfig) or tower.registers or tower.layer_scale or tower.pos != "learned":
        return "an image tower that is no plain ViT"
    if config.project and (tower.stem != "clip" or tower.pool != "cls" or config.bias or not config.text.causal):
        return "towers that are not those of CLIP"
    if not config.project and (tower.stem != "patch" or tower.pool != "map" or not config.bias or config.text.causal):
        return "towers that are not those of SigLIP"
    return None


FORMATS: dict[Format, FormatSpec] = {
    "hf": FormatSpec(r"text_model\.embeddings\.token_embedding\.weight", read_hf, write_hf, unsupported),
    "original": FormatSpec(
        r"visual\.(?:class_embedding|trunk\.patch_embed\.proj\.weight)", read_original, write_original, unsupported
    ),
    "vitrail": FormatSpec(r"text\.token_embed\.weight", identity),
}


def architecture(
    where: str, state: Mapping[str, Tensor], sidecar: Sidecar, model: TwoTowerConfig | None
) -> TwoTowerConfig:
    """The configuration of both towers, from tensor shapes."""
    tower: Any = None if model is None else model.image
    image = replace(vit.architecture(where, _below(state, "image."), sidecar, tower), classes=0)
    vocab, width = tensor_shape(where, "text tower", state, "text.token_embed.weight", 2)
    length = tensor_shape(where, "text tower", state, "text.pos_embed", 3)[1]
    joint = tensor_shape(where, "text tower", state, "text_proj.weight", 2)[0]
    depth = count_blocks(state, r"text\.blocks\.(\d+)\.")
    mlp = tensor_shape(where, "text tower", state, "text.blocks.0.mlp.fc1.weight", 2)[0]
    project, bias = "image_proj.weight" in state, "logit_bias" in state
    known = _numerics(sidecar, model, project)
    act = _text_act(sidecar, project) or (known["act"] if model is None else model.text.act)
    heads = sidecar.text.get("num_attention_heads") or sidecar.text.get("heads")
    heads = heads or (max(width // 64, 1) if model is None else model.text.heads)
    pool: Any = "end" if project else "last"
    text = TextConfig(width, depth, int(heads), mlp, vocab, length, project, pool, act, known["eps"])
    return TwoTowerConfig(replace(image, **known), text, joint, project, bias)


def _numerics(sidecar: Sidecar, model: TwoTowerConfig | None, project: bool) -> dict[str, Any]:
    """The activation of the image tower, LayerNorm's epsilon and the resampling of positions."""
    tower: Any = None if model is None else model.image
    usual: dict[str, Any] = {"act": "gelu" if project else "gelu_tanh", "eps": 1e-5 if project else 1e-6}
    if tower is not None:
        usual = {"act": tower.act, "eps": tower.eps}
    said = {"act": sidecar.fields.get("act"), "eps": sidecar.eps}
    known = {name: said[name] if said[name] is not None else value for name, value in usual.items()}
    return known | {"resample": "bicubic_plain" if sidecar.text else "bicubic"}


def _text_act(sidecar: Sidecar, project: bool) -> Activation | None:
    """The activation of the text tower, which `config.json` leaves out if it is the usual one."""
    usual = clip.DEFAULTS if project else clip.SIGLIP
    return hf.activation({**usual, **sidecar.text}) if sidecar.text else None


def hf_fields(document: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the image tower that only `config.json` has."""
    return hf.hf_fields(document)


def hf_config(config: TwoTowerConfig) -> dict[str, Any]:
    """Both towers for `config.json`."""
    image: Any = config.image
    kind = "clip" if config.project else "siglip"
    vision = _hf_tower(image.width, image.depth, image.heads, image.mlp, image.act, image.eps)
    vision |= {"image_size": image.img_size[0], "patch_size": image.patch, "num_channels": image.channels}
    c = config.text
    text = _hf_tower(c.width, c.depth, c.heads, c.mlp, c.act, c.eps)
    text |= {"vocab_size": c.vocab, "max_position_embeddings": c.length}
    if config.project:
        text |= {"bos_token_id": c.vocab - 2, "eos_token_id": c.vocab - 1}
        shared = {"projection_dim": config.classes}
        return {
            "architectures": ["CLIPModel"],
            "model_type": kind,
            "vision_config": vision | shared,
            "text_config": text | shared,
            **shared,
        }
    text["projection_size"] = config.classes
    return {"architectures": ["SiglipModel"], "model_type": kind, "vision_config": vision, "text_config": text}


def _hf_tower(width: int, depth: int, heads: int, mlp: int, act: Activation, eps: float) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "intermediate_size": mlp,
        "hidden_act": hf.act_name(act),
        "layer_norm_eps": eps,
    }


def read_open_clip(document: Mapping[str, Any]) -> Sidecar:
    """The content of `open_clip_config.json`."""
    about = document["model_cfg"]
    seen, words, how = about.get("vision_cfg", {}), about.get("text_cfg", {}), document.get("preprocess_cfg", {})
    act: Activation = "quick_gelu" if about.get("quick_gelu") else "gelu"
    tanh = (words.get("act_kwargs") or {}).get("approximate") == "tanh"
    fields = {"act": act, **timm.architecture_fields(str(seen.get("timm_model_name")))}
    if "timm_model_name" not in seen and "width" in seen:
        fields["heads"] = seen["width"] // seen.get("head_width", 64)
    return Sidecar(
        fields=fields,
        img_size=seen.get("image_size"),
        mean=how.get("mean"),
        std=how.get("std"),
        crop=1.0,
        interpolation=how.get("interpolation"),
        text={"heads": words.get("heads"), "hidden_act": hf.act_name("gelu_tanh" if tanh else act)},
    )


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensors[name] for name in tensors if name.startswith(prefix)}


def _logits(tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Scale and bias of the logits: vectors of one number in transformers' SigLIP and here, scalars elsewhere."""
    return {name: tensors[name].reshape(shape) for name in ("logit_scale", "logit_bias") if name in tensors}


def _read_siglip_tower(vision: dict[str, Tensor]) -> dict[str, Tensor]:
    """SigLIP's image tower: no class token, and attention pooling whose queries, keys and values are one matrix."""
    top = {n: t for n, t in clip.TOP.items() if n not in ("cls_token", "norm_pre")}
    top |= {f"{_POOL_PREFIX}{ours}": theirs for ours, theirs in _POOL.items()}
    depth = count_blocks(vision, r"encoder\.layers\.(\d+)\.")
    state = fuse(rename(vision, inverse(key_table(depth, top, clip.BLOCK, clip.WHERE))))
    state["pos_embed"] = state["pos_embed"].unsqueeze(0)
    for kind in ("weight", "bias"):
        whole = state.pop(f"head.attention.in_proj_{kind}")
        width = len(whole) // 3
        state |= {f"attn_pool.q.{kind}": whole[:width], f"attn_pool.kv.{kind}": whole[width:]}
    return state


def _write_siglip_tower(image: Mapping[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """The inverse of `_read_siglip_tower`."""
    pool = re.compile(r"attn_pool\.(q|kv)\.")
    theirs = split_qkv({name: value for name, value in image.items() if not pool.match(name)})
    theirs["pos_embed"] = theirs["pos_embed"][0]
    top = clip.TOP | {f"{_POOL_PREFIX}{ours}": there for ours, there in _POOL.items()}
    named = rename(theirs, key_table(config.depth, top, clip.BLOCK, clip.WHERE))
    for kind in ("weight", "bias"):
        parts = [image[f"attn_pool.{part}.{kind}"] for part in ("q", "kv")]
        named[f"head.attention.in_proj_{kind}"] = torch.cat(parts)
    return {f"vision_model.{name}": value for name, value in named.items()}
