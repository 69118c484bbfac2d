"""ViTs in the formats of others: which architecture their tensors have, and what our own models make of them.

What each format calls them is in `timm.py`, `hf.py`, `npz.py` and `torchvision.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor

from vitrail.config import Size
from vitrail.errors import UserError, some
from vitrail.models.vit import Pool, ViTConfig
from vitrail.weights.formats import HALF, IMAGENET, Format, Habit, Layout, compare, hf, npz, sizes, timm, torchvision
from vitrail.weights.sidecar import Beside

# The usual number of heads of a width, by the tables of the papers.
_HEADS = {192: 3, 384: 6, 512: 8, 768: 12, 1024: 16, 1152: 16, 1280: 16, 1408: 16, 1536: 24, 1664: 16}
_LAYER_SCALE = 1e-5  # its first value, which trained weights have replaced


def _layout(format: Format, module: ModuleType) -> Layout:
    def cannot(config: ViTConfig) -> str | None:
        if config.pos != "learned" and (format, config.pos) != ("timm", "patches"):
            return f"positions '{config.pos}'"
        missing: str | None = module.cannot(config)
        return "a convolutional stem" if config.stem != "patch" else missing

    return Layout(re.escape(module.MARKER), module.read, module.write, cannot)


_MODULES: dict[Format, ModuleType] = {"timm": timm, "hf": hf, "npz": npz, "torchvision": torchvision}
LAYOUTS: dict[Format, Layout] = {format: _layout(format, module) for format, module in _MODULES.items()}

hf_settings, hf_document = hf.hf_settings, hf.hf_document


def architecture(where: str, state: Mapping[str, Tensor], beside: Beside, model: ViTConfig | None) -> ViTConfig:
    """The architecture that tensors have, by their shapes; `classes` is 0 where there is no head."""
    width, channels, patch, other = sizes(where, "ViT", state, "patch_embed.proj.weight", 4)
    if any("patch_embed.convs" in name or "patch_embed.backbone" in name for name in state):
        raise UserError(f"{where} has a convolutional stem: its model.json is needed beside it.")
    if patch != other:
        raise UserError(f"{where} has patches of {patch}x{other} pixels; vitrail's are squares.")
    depth = len({match[1] for name in state if (match := re.match(r"blocks\.(\d+)\.", name))})
    hidden = sizes(where, "ViT", state, "blocks.0.mlp.fc1.weight", 2)[0]
    read = {sizes(where, "ViT", state, name, 2)[1] for name in state if name.endswith(".mlp.fc2.weight")}
    gated = read == {hidden / 2}
    mlp = hidden // 2 if gated else hidden
    if model is not None:
        seen = {"width": width, "depth": depth, "mlp": mlp, "patch": patch}
        compare(where, seen, {name: getattr(model, name) for name in seen})
    pool = _pool(state, width)
    if pool == "cls" and "head.weight" not in state and model is not None and model.pool == "cls_gap":
        pool = "cls_gap"  # what a head reads is seen from its shape alone
    registers = _tokens(state, "reg_token") + (_tokens(state, "dist_token") if pool != "cls_dist" else 0)
    asked = model.img_size if model is not None and model.patch == patch else None
    placed = ("cls_token" in state) + (pool == "cls_dist")
    size = _img_size(where, state, (0, placed, placed + registers), patch, beside.img_size, asked)
    told = model.pos if model is not None else beside.fields.get("pos")
    bare = state["pos_embed"].shape[1] == (size[0] // patch) * (size[1] // patch)
    return ViTConfig(
        width=width,
        depth=depth,
        heads=_heads(where, width, beside, model),
        mlp=mlp,
        patch=patch,
        img_size=size,
        channels=channels,
        classes=sizes(where, "ViT", state, "head.weight", 2)[0] if "head.weight" in state else 0,
        pool=pool,
        pos="patches" if told == "patches" and bare else "learned",
        head="tanh" if "pre_logits.weight" in state else "linear",
        act="swiglu" if gated else "gelu",
        registers=registers,
        layer_scale=_LAYER_SCALE if "blocks.0.ls1.gamma" in state else 0.0,
    )


def habit(format: Format, state: Mapping[str, Tensor], wrapped: tuple[str, ...], config: ViTConfig) -> Habit:
    """How images are usually prepared for such weights, which a checkpoint may have had under a name."""
    # DeiT and MAE come as {"model": …}, DINO and DINOv2 without a head: all are of one house.
    facebook = format == "timm" and (wrapped[:1] in (("model",), ("teacher",)) or "head.weight" not in state)
    imagenet = facebook or format == "torchvision" or config.layer_scale > 0 or config.pool == "cls_dist"
    bilinear = format == "torchvision" or (format == "hf" and not config.layer_scale)
    usual = replace(IMAGENET, crop=0.875) if imagenet else HALF
    return replace(usual, interpolation="bilinear" if bilinear else "bicubic")


def turned(state: Mapping[str, Tensor], config: ViTConfig) -> list[str]:
    """A sentence on a distillation token that has no head, which is a register here."""
    alone = "dist_token" in state and config.pool != "cls_dist"
    return ["dist_token became a register: it has no head"] if alone else []


def settle(state: dict[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """Tokens, positions and head as our models have them.

    A distillation token without a head becomes a register, positions of registers are added to them, and a class token
    that has none gets one that adds nothing. A head that reads the average of the patches by zeros alone does not here.
    """
    settled = dict(state)
    if "dist_token" in settled and config.pool != "cls_dist":
        settled["reg_token"] = settled.pop("dist_token")
    if "fc_norm.weight" in settled:
        settled |= {f"norm.{kind}": settled.pop(f"fc_norm.{kind}") for kind in ("weight", "bias")}
    head = settled.get("head.weight")
    if head is not None and config.pool == "cls" and head.shape[1:] == (2 * config.width,):
        first, second = head.chunk(2, dim=1)
        settled["head.weight"] = first if second.is_meta or not second.any() else head
    if "pos_embed" not in settled:
        return settled
    pos, placed, registers = settled["pos_embed"], config.placed, config.registers
    extra = pos.shape[1] - config.grid[0] * config.grid[1]
    if registers and "reg_token" in settled and extra == placed + registers:
        settled["reg_token"] = settled["reg_token"] + pos[:, placed:extra]
        pos = torch.cat([pos[:, :placed], pos[:, extra:]], dim=1)
    elif placed and extra == 0 and config.pos == "learned":
        pos = torch.cat([torch.zeros_like(pos[:, :placed]), pos], dim=1)
    settled["pos_embed"] = pos
    return settled


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


def _img_size(where: str, state: Mapping[str, Tensor], others: tuple[int, ...], patch: int, *said: Size | None) -> Size:
    """The image size that the positions are for: as somebody says if that fits, else of a square.

    `others` says how many of the positions may be those of tokens that are no patch.
    """
    rows = sizes(where, "ViT", state, "pos_embed", 3)[1]
    counts = {rows - prefix for prefix in others} - {0}
    for size in said:
        if size is not None and (size[0] // patch) * (size[1] // patch) in counts:
            return size[0] // patch * patch, size[1] // patch * patch
    sides = sorted({math.isqrt(count) for count in counts if count > 0 and math.isqrt(count) ** 2 == count})
    if len(sides) == 1:
        return sides[0] * patch, sides[0] * patch
    squares = f"squares of {' or '.join(f'{side}x{side}' for side in sides)}" if sides else "no square"
    raise UserError(
        f"{where} has {rows} positions, which are {squares} of patches. Give the model with its image size: "
        "`model` may be a configuration, vitrail.models.configure(NAME, img_size=…)."
    )


def _heads(where: str, width: int, beside: Beside, model: ViTConfig | None) -> int:
    shown: int | None = beside.fields.get("heads")
    if shown and model is not None:
        compare(where, {"heads": shown}, {"heads": model.heads})
    told = shown or (model.heads if model is not None else _HEADS.get(width))
    if told is None:
        candidates = [str(heads) for heads in range(1, width + 1) if width % heads == 0 and width // heads >= 8]
        raise UserError(
            f"{where} is a ViT of width {width}, whose number of heads its tensors do not show: it may be "
            f"{some(candidates, 12)}. Put a config.json beside it, or give `model`."
        )
    return told
