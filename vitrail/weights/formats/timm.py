"""timm's `VisionTransformer` and `VisionTransformerDistilled`, whose names are ours, and those who took its names over:
DeiT, DeiT III, MAE, DINO, DINOv2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vitrail.models.vit import ViTConfig
from vitrail.weights.key_tables import count_blocks, inverse, rename, stems
from vitrail.weights.sidecar import Beside

MARKER = "patch_embed.proj.weight"

# What the authors of DINOv2 and of DeiT III call otherwise.
_TOP = {"reg_token": "register_tokens", "head": "linear_head"}
_BLOCK = {"mlp.fc1": "mlp.w12", "mlp.fc2": "mlp.w3", "ls1.gamma": "gamma_1", "ls2.gamma": "gamma_2"}


def read(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors under our names."""
    depth = count_blocks(tensors, r"blocks\.(\d+)\.")
    return rename(tensors, inverse(stems(depth, _TOP, _BLOCK, "blocks.{}.")))


def write(state: Mapping[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """Our tensors under their names.

    timm gives all tokens that are no patch a position, or none of them (`no_embed_class=True`, as DeiT III and DINOv2
    with registers have it): none if the class token's adds nothing, else registers get one that adds nothing.
    """
    theirs = dict(state)
    pos = state["pos_embed"]
    count = config.placed if config.pos == "learned" else 0
    placed, patches = pos[:, :count], pos[:, count:]
    if not placed.is_meta and not placed.any():
        theirs["pos_embed"] = patches
    elif config.registers:
        nothing = torch.full((1, config.registers, config.width), -0.0)  # what it is added to keeps even its sign
        theirs["pos_embed"] = torch.cat([placed, nothing, patches], dim=1)
    if config.pool in ("gap_norm", "mae"):
        theirs |= {f"fc_norm.{kind}": theirs.pop(f"norm.{kind}") for kind in ("weight", "bias")}
    return theirs


def cannot(config: ViTConfig) -> str | None:
    """What of a model the format has no place for."""
    parts = {
        "a hidden tanh layer before the head": config.head == "tanh",
        "a head on the class token and the average": config.pool == "cls_gap",
        "registers beside a distillation token": config.pool == "cls_dist" and config.registers,
    }
    return next((what for what, there in parts.items() if there), None)


def settings(document: Mapping[str, Any]) -> Beside:
    """What a `config.json` of timm's says: it has `pretrained_cfg` in it."""
    about = document["pretrained_cfg"]
    arguments = document.get("model_args") or {}
    size = arguments.get("img_size") or about["input_size"][1:]
    return Beside(
        fields={"heads": arguments.get("num_heads")},
        img_size=size,
        classes=tuple(about.get("label_names") or document.get("label_names") or ()),
        mean=about.get("mean"),
        std=about.get("std"),
        crop=about.get("crop_pct"),
        interpolation=about.get("interpolation"),
    )
