"""timm's `VisionTransformer`, whose names are ours, and those who took its names over: DeiT, MAE, DINO, DINOv2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vitrail.models import ModelConfig
from vitrail.weights.beside import Beside

MARKER = "patch_embed.proj.weight"


def read(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors under our names."""
    table = {"register_tokens": "reg_token"}  # as DINOv2's authors call them
    return {table.get(name, name): tensors[name] for name in tensors}


def write(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Our tensors under their names. timm gives all prefix tokens a position: that of registers adds nothing."""
    theirs = dict(state)
    if config.registers:
        pos = state["pos_embed"]
        cls = config.prefix - config.registers
        nothing = torch.full((1, config.registers, config.width), -0.0)  # what it is added to keeps even its sign
        theirs["pos_embed"] = torch.cat([pos[:, :cls], nothing, pos[:, cls:]], dim=1)
    if config.pool == "gap_norm":
        theirs |= {f"fc_norm.{kind}": theirs.pop(f"norm.{kind}") for kind in ("weight", "bias")}
    return theirs


def cannot(config: ModelConfig) -> str | None:
    """What of a model the format has no place for."""
    return "a hidden tanh layer before the head" if config.head == "tanh" else None


def settings(document: Mapping[str, Any]) -> Beside:
    """What a `config.json` of timm's says: it has `pretrained_cfg` in it."""
    about = document["pretrained_cfg"]
    arguments = document.get("model_args") or {}
    size = arguments.get("img_size") or about["input_size"][1:]
    return Beside(
        heads=arguments.get("num_heads"),
        img_size=size,
        classes=tuple(about.get("label_names") or document.get("label_names") or ()),
        mean=about.get("mean"),
        std=about.get("std"),
        crop=about.get("crop_pct"),
        interpolation=about.get("interpolation"),
    )
