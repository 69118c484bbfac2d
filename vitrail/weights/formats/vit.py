"""ViT formats: the configuration of foreign weights, and their adaptation to our models.

The key tables are in `timm.py`, `hf.py`, `npz.py` and `torchvision.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from vitrail.config import Size
from vitrail.errors import UserError, shortlist
from vitrail.models.layers import Activation
from vitrail.models.position import Interpolation
from vitrail.models.vit import Pool, ViTConfig
from vitrail.weights.formats import (
    CLIP,
    HALF,
    IMAGENET,
    Format,
    FormatSpec,
    ImageDefaults,
    check_match,
    hf,
    npz,
    pattern,
    tensor_shape,
    timm,
    torchvision,
)
from vitrail.weights.sidecar import Sidecar
from vitrail.weights.tensors import Tensors

# The number of heads by width, from the papers' tables.
_HEADS = {192: 3, 384: 6, 512: 8, 768: 12, 1024: 16, 1152: 16, 1280: 16, 1408: 16, 1536: 24, 1664: 16}
_LAYER_SCALE = 1e-5  # the initial value, which the weights overwrite
_USUAL = 224  # the image size of published weights whose tensors do not show it


def _format_spec(format: Format, module: ModuleType) -> FormatSpec:
    def unsupported(config: ViTConfig) -> str | None:
        if config.pos != "learned" and (format, config.pos) not in _OTHER_POSITIONS:
            return f"positions '{config.pos}'"
        missing: str | None = module.unsupported(config) or pattern(config)
        stem = {"conv": "a convolutional stem"} | ({} if format in ("timm", "hf") else {"clip": "CLIP's stem"})
        return stem.get(config.stem, missing)

    stacked = format == "big_vision"
    marker, write = (npz.SCANNED_MARKER, npz.write_big_vision) if stacked else (module.MARKER, module.write)
    return FormatSpec(marker, module.read, write, unsupported, act=module.ACT)


# big_vision's files are a kind of `.npz`: those with stacked blocks are read and written as "big_vision".
_MODULES: dict[Format, ModuleType] = {
    "timm": timm,
    "hf": hf,
    "big_vision": npz,
    "npz": npz,
    "torchvision": torchvision,
}
_OTHER_POSITIONS = (("timm", "patches"), ("npz", "sincos2d"), ("big_vision", "sincos2d"))
FORMATS: dict[Format, FormatSpec] = {format: _format_spec(format, module) for format, module in _MODULES.items()}

hf_fields, hf_config = hf.hf_fields, hf.hf_config


def architecture(where: str, state: Mapping[str, Tensor], sidecar: Sidecar, model: ViTConfig | None) -> ViTConfig:
    """The configuration, from tensor shapes; `classes` is 0 if there is no head."""
    width, channels, patch, other = tensor_shape(where, "ViT", state, "patch_embed.proj.weight", 4)
    if any("patch_embed.convs" in name or "patch_embed.backbone" in name for name in state):
        raise UserError(f"{where} has a convolutional stem, so it needs its model.json in the same folder.")
    if patch != other:
        raise UserError(f"{where} has patches of {patch}x{other} pixels, but vitrail's are square.")
    depth = len({match[1] for name in state if (match := re.match(r"blocks\.(\d+)\.", name))})
    hidden = tensor_shape(where, "ViT", state, "blocks.0.mlp.fc1.weight", 2)[0]
    read = {tensor_shape(where, "ViT", state, name, 2)[1] for name in state if name.endswith(".mlp.fc2.weight")}
    gated = read == {hidden / 2}
    mlp = hidden // 2 if gated else hidden
    if model is not None:
        seen = {"width": width, "depth": depth, "mlp": mlp, "patch": patch}
        check_match(where, seen, {name: getattr(model, name) for name in seen})
    pool = _pool(state, width)
    if pool == "cls" and "head.weight" not in state and model is not None and model.pool == "cls_gap":
        pool = "cls_gap"  # only the shape of the head, missing here, would show it
    registers = _tokens(state, "reg_token") + (_tokens(state, "dist_token") if pool != "cls_dist" else 0)
    asked = model.img_size if model is not None and model.patch == patch else None
    placed = ("cls_token" in state) + (pool == "cls_dist")
    pos = sidecar.fields.get("pos") if model is None else model.pos
    if sidecar.fields.get("pos") == "sincos2d" and "pos_embed" not in state:
        pos, size = "sincos2d", sidecar.img_size or asked or (_USUAL // patch * patch, _USUAL // patch * patch)
    else:
        size = _img_size(where, state, (0, placed, placed + registers), patch, sidecar.img_size, asked)
        bare = state["pos_embed"].shape[1] == (size[0] // patch) * (size[1] // patch)
        pos = "patches" if pos == "patches" and bare else "learned"
    return ViTConfig(
        width=width,
        depth=depth,
        heads=_heads(where, width, sidecar, model),
        mlp=mlp,
        patch=patch,
        img_size=size,
        channels=channels,
        classes=tensor_shape(where, "ViT", state, "head.weight", 2)[0] if "head.weight" in state else 0,
        pool=pool,
        pos=pos,
        head="tanh" if "pre_logits.weight" in state else "linear",
        stem="clip" if "norm_pre.weight" in state else "patch",
        act="swiglu" if gated else "gelu",
        registers=registers,
        layer_scale=_LAYER_SCALE if "blocks.0.ls1.gamma" in state else 0.0,
    )


def numerics(format: Format, tensors: Tensors, config: ViTConfig) -> dict[str, Any]:
    """The activation, LayerNorm's epsilon and the resampling of positions in the code that such weights come from."""
    clip, dinov2 = config.stem == "clip", config.layer_scale > 0
    act: Activation = "quick_gelu" if clip and format == "hf" else FORMATS[format].act
    eps = 1e-5 if clip else 1e-12 if format == "hf" and not dinov2 else 1e-6
    resample: Interpolation = "bicubic"
    if format in ("npz", "big_vision"):
        resample = "linear"
    elif format == "torchvision":
        resample = "bicubic_aligned"
    elif format == "hf" and not (dinov2 and config.registers):
        resample = "bicubic_plain"
    elif tensors.wrapped[:1] == ("teacher",) or (dinov2 and not config.registers and "mask_token" in tensors):
        resample = "bicubic_offset"  # DINO's and DINOv2's releases; timm's copies have no mask token
    elif tensors.wrapped[:1] == ("model",):
        resample = "bicubic_plain"  # DeiT's, DeiT III's and MAE's
    return {"act": act, "eps": eps, "resample": resample}


def defaults(format: Format, state: Mapping[str, Tensor], wrapped: tuple[str, ...], config: ViTConfig) -> ImageDefaults:
    """The usual preprocessing of such weights; `wrapped` are the keys of the checkpoint that contained them."""
    if config.stem == "clip":
        return CLIP
    # Releases of Facebook Research: DeiT and MAE come as {"model": …}, DINO and DINOv2 without a head.
    facebook = format == "timm" and (wrapped[:1] in (("model",), ("teacher",)) or "head.weight" not in state)
    facebook = facebook or "decoder.decoder_embed.weight" in state  # ViT-MAE of Hugging Face
    imagenet = facebook or format == "torchvision" or config.layer_scale > 0 or config.pool == "cls_dist"
    bilinear = format == "torchvision" or (format == "hf" and not config.layer_scale)
    usual = replace(IMAGENET, crop=0.875) if imagenet else HALF
    return replace(usual, interpolation="bilinear" if bilinear else "bicubic")


def conversion_notes(state: Mapping[str, Tensor], config: ViTConfig) -> list[str]:
    """A note if a distillation token without a head was loaded as a register."""
    headless = "dist_token" in state and config.pool != "cls_dist"
    return ["dist_token was loaded as a register: it has no head"] if headless else []


def adapt_state(state: dict[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """Adapts tokens, positions and head to our models.

    A distillation token without a head becomes a register; position embeddings of registers are added to them; a class
    token without one gets a zero one; a head whose weights for the patch average are all zero drops them.
    """
    adapted = dict(state)
    if "dist_token" in adapted and config.pool != "cls_dist":
        adapted["reg_token"] = adapted.pop("dist_token")
    if "fc_norm.weight" in adapted:
        adapted |= {f"norm.{kind}": adapted.pop(f"fc_norm.{kind}") for kind in ("weight", "bias")}
    head = adapted.get("head.weight")
    if head is not None and config.pool == "cls" and head.shape[1:] == (2 * config.width,):
        first, second = head.chunk(2, dim=1)
        adapted["head.weight"] = first if second.is_meta or not second.any() else head
    if "pos_embed" not in adapted:
        return adapted
    pos, placed, registers = adapted["pos_embed"], config.placed, config.registers
    extra = pos.shape[1] - config.grid[0] * config.grid[1]
    if registers and "reg_token" in adapted and extra == placed + registers:
        adapted["reg_token"] = adapted["reg_token"] + pos[:, placed:extra]
        pos = torch.cat([pos[:, :placed], pos[:, extra:]], dim=1)
    elif placed and extra == 0 and config.pos == "learned":
        pos = torch.cat([torch.zeros_like(pos[:, :placed]), pos], dim=1)
    adapted["pos_embed"] = pos
    return adapted


def _pool(state: Mapping[str, Tensor], width: int) -> Pool:
    if "fc_norm.weight" in state:
        return "mae" if "cls_token" in state else "gap_norm"
    if "cls_token" not in state:
        return "map" if "attn_pool.latent" in state else "gap"
    if "dist_token" in state and ("head_dist.weight" in state or "head.weight" not in state):
        return "cls_dist"
    return "cls_gap" if "head.weight" in state and state["head.weight"].shape[1:] == (2 * width,) else "cls"


def _tokens(state: Mapping[str, Tensor], name: str) -> int:
    return state[name].shape[1] if name in state and state[name].ndim == 3 else 0


def _img_size(
    where: str, state: Mapping[str, Tensor], prefixes: tuple[int, ...], patch: int, *candidates: Size | None
) -> Size:
    """The image size that matches the position embeddings: a candidate that fits, else a square.

    `prefixes` are the possible numbers of positions for prefix tokens.
    """
    rows = tensor_shape(where, "ViT", state, "pos_embed", 3)[1]
    counts = {rows - prefix for prefix in prefixes} - {0}
    for size in candidates:
        if size is not None and (size[0] // patch) * (size[1] // patch) in counts:
            return size[0] // patch * patch, size[1] // patch * patch
    sides = sorted({math.isqrt(count) for count in counts if count > 0 and math.isqrt(count) ** 2 == count})
    if len(sides) == 1:
        return sides[0] * patch, sides[0] * patch
    fit = f"{' or '.join(f'{side}x{side}' for side in sides)} patches" if sides else "no square image"
    raise UserError(
        f"{where} has {rows} positions, which fit {fit}. Give `model` with its image size: "
        "vitrail.models.configure(NAME, img_size=…)."
    )


def _heads(where: str, width: int, sidecar: Sidecar, model: ViTConfig | None) -> int:
    known: int | None = sidecar.fields.get("heads")
    if known and model is not None:
        check_match(where, {"heads": known}, {"heads": model.heads})
    heads = known or (model.heads if model is not None else _HEADS.get(width))
    if heads is None:
        candidates = [str(number) for number in range(1, width + 1) if width % number == 0 and width // number >= 8]
        raise UserError(
            f"{where} is a ViT of width {width}, whose tensors do not show the number of heads: it may be "
            f"{shortlist(candidates, 12)}. Add a config.json to its folder, or give `model`."
        )
    return heads
