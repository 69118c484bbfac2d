"""ViT format of timm (our names): `VisionTransformer`, `VisionTransformerDistilled`, and releases that use its names:
DeiT, DeiT III, MAE, DINO, DINOv2. CLIP's image towers too."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vitrail.models import aliases, swin_v2
from vitrail.models.layers import Activation
from vitrail.models.vit import ViTConfig
from vitrail.weights.key_tables import count_blocks, inverse, key_table, rename
from vitrail.weights.sidecar import Sidecar

MARKER = r"patch_embed\.proj\.weight"
ACT: Activation = "gelu"

# Names that differ in the releases of DINOv2 and DeiT III.
_TOP = {"reg_token": "register_tokens", "head": "linear_head"}
_BLOCK = {"mlp.fc1": "mlp.w12", "mlp.fc2": "mlp.w3", "ls1.gamma": "gamma_1", "ls2.gamma": "gamma_2"}
# SigLIP's towers with the tanh approximation of GELU; the others compute it exactly.
_TANH = re.compile(r"vit_(base_patch32|so400m_patch16|giantopt_patch16|large_patch16(?=_siglip(_gap)?_512))_siglip")


def read(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors under our names."""
    depth = count_blocks(tensors, r"blocks\.(\d+)\.")
    return rename(tensors, inverse(key_table(depth, _TOP, _BLOCK, "blocks.{}.")))


def write(state: Mapping[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """Our tensors under their names.

    timm has position embeddings for all prefix tokens or for none (`no_embed_class=True`, as in DeiT III and DINOv2
    with registers). If the class token's is zero, none are written; else registers get zero ones.
    """
    theirs = dict(state)
    pos = state["pos_embed"]
    count = config.placed if config.pos == "learned" else 0
    placed, patches = pos[:, :count], pos[:, count:]
    if not placed.is_meta and not placed.any():
        theirs["pos_embed"] = patches
    elif config.registers:
        zeros = torch.full((1, config.registers, config.width), -0.0)  # adding -0.0 keeps the sign of zeros
        theirs["pos_embed"] = torch.cat([placed, zeros, patches], dim=1)
    if config.pool in ("gap_norm", "mae"):
        theirs |= {f"fc_norm.{kind}": theirs.pop(f"norm.{kind}") for kind in ("weight", "bias")}
    return theirs


def unsupported(config: ViTConfig) -> str | None:
    """The feature of a model that the format cannot represent."""
    parts = {
        "a hidden tanh layer before the head": config.head == "tanh",
        "a head on the class token and the patch average": config.pool == "cls_gap",
        "registers with a distillation token": config.pool == "cls_dist" and config.registers,
    }
    return next((what for what, there in parts.items() if there), None)


def read_sidecar(document: Mapping[str, Any]) -> Sidecar:
    """The content of timm's `config.json`, recognised by its `pretrained_cfg`."""
    pretrained = document["pretrained_cfg"]
    arguments = document.get("model_args") or {}
    size = arguments.get("img_size") or pretrained["input_size"][1:]
    return Sidecar(
        fields={
            **architecture_fields(str(document.get("architecture"))),
            **_arguments(document, pretrained, arguments),
            **_windows(document, arguments),
        },
        img_size=size,
        classes=tuple(pretrained.get("label_names") or document.get("label_names") or ()),
        mean=pretrained.get("mean"),
        std=pretrained.get("std"),
        crop=pretrained.get("crop_pct"),
        interpolation=pretrained.get("interpolation"),
    )


def _windows(document: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The windows of a Swin v2, which only the arguments or the name of the architecture show."""
    short, _ = aliases.find(str(document.get("architecture"))) or ("", {})
    listed = swin_v2.CONFIGS.get(short)
    named = {} if listed is None else {"window": listed.window, "pretrained": listed.pretrained}
    given = {"window": arguments.get("window_size"), "pretrained": arguments.get("pretrained_window_sizes")}
    return named | {name: value for name, value in given.items() if value is not None}


def _arguments(
    document: Mapping[str, Any], pretrained: Mapping[str, Any], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """The heads and the activation, where the files show them.

    OpenAI's CLIP has QuickGELU. timm's copies note it but compute GELU, unless a model's name has "quickgelu".
    """
    named = {"gelu": "gelu", "gelu_tanh": "gelu_tanh", "quick_gelu": "quick_gelu", "quickgelu": "quick_gelu"}
    act = named.get(str(arguments.get("act_layer")))
    natively = any("natively QuickGELU" in str(note) for note in pretrained.get("notes") or ())
    if act is None and (natively or "quickgelu" in str(document.get("architecture"))):
        act = "quick_gelu"
    found = {"heads": arguments.get("num_heads"), "act": act}
    return {name: value for name, value in found.items() if value is not None}


def architecture_fields(name: str) -> dict[str, Any]:
    """The heads and the activation of SigLIP's towers that only the name of the architecture shows."""
    heads = {"heads": 16} if name.startswith("vit_giantopt_patch16_siglip") else {}
    return heads | ({"act": "gelu_tanh"} if _TANH.match(name) else {})
