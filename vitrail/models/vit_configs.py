"""The named ViTs, with the sizes of the papers, and names for other sizes."""

from __future__ import annotations

import re
from dataclasses import replace

from vitrail.models.vit import ViTConfig

# Table 1 of the paper, Ti and S of DeiT and AugReg, g and G of "Scaling Vision Transformers", and our own nano for
# images of 8 to 96 pixels: width, depth, heads, mlp.
_VIT_SIZES = {
    "nano": (128, 6, 4, 256),
    "ti": (192, 12, 3, 768),
    "s": (384, 12, 6, 1536),
    "b": (768, 12, 12, 3072),
    "l": (1024, 24, 16, 4096),
    "h": (1280, 32, 16, 5120),
    "giant": (1408, 40, 16, 6144),
    "gigantic": (1664, 48, 16, 8192),
}
_PATCHES = {
    "nano": (2, 4, 8),
    "ti": (16,),
    "s": (32, 16),
    "b": (32, 16, 8),
    "l": (32, 16, 14),
    "h": (14,),
    "giant": (14,),
    "gigantic": (14,),
}
LARGEST_PATCH = 32


def _vit(size: str, patch: int) -> ViTConfig:
    native = 32 if size == "nano" else 224
    side = max(round(native / patch), 1) * patch
    if size == "nano":
        return ViTConfig(*_VIT_SIZES[size], patch, (side, side), pool="gap", stem="conv")
    return ViTConfig(*_VIT_SIZES[size], patch, (side, side))


def _dinov2(size: str) -> ViTConfig:
    """DINOv2: the paper's sizes with LayerScale, and its own giant with gated MLPs."""
    numbers = (1536, 40, 24, 4096) if size == "g" else _VIT_SIZES[size]
    return ViTConfig(*numbers, 14, (518, 518), act="swiglu" if size == "g" else "gelu", layer_scale=1e-5)


def _deit(size: str, patch: int) -> ViTConfig:
    """DeiT: a distillation token with its own head."""
    return replace(_vit(size, patch), pool="cls_dist")


def _deit3(size: str, patch: int) -> ViTConfig:
    """DeiT III: LayerScale, and no position embedding for the class token."""
    numbers = (512, 12, 8, 2048) if size == "m" else _VIT_SIZES[size]
    return ViTConfig(*numbers, patch, pos="patches", layer_scale=1e-6)


def _clip(size: str, patch: int) -> ViTConfig:
    """The image tower of OpenAI's CLIP."""
    return replace(_vit(size, patch), stem="clip", act="quick_gelu", eps=1e-5)


_DEIT = {f"deit_nano{patch}": _deit("nano", patch) for patch in _PATCHES["nano"]} | {
    f"deit_{size}16": _deit(size, 16) for size in ("ti", "s", "b")
}
_DEIT3 = {
    f"deit3_{size}{patch}": _deit3(size, patch) for size, patch in zip("smblh", (16, 16, 16, 16, 14), strict=True)
}
_VITS = {f"vit_{size}{patch}": _vit(size, patch) for size, patches in _PATCHES.items() for patch in patches} | {
    f"dinov2_{size}14": _dinov2(size) for size in "sblg"
}

_CLIP = {f"clip_{size}{patch}": _clip(size, patch) for size, patch in (("b", 32), ("b", 16), ("l", 14))}

# ViTs of other patch sizes are built from their names: see `of_any_patch`.
CONFIGS = {**_VITS, **_DEIT, **_DEIT3, **_CLIP}


def of_any_patch(short: str) -> ViTConfig | None:
    """The ViT of a listed size with any patch size in its name, such as vit_b12."""
    match = re.fullmatch(r"(vit|deit)_([a-z]+)(\d+)", short)
    if match is None or not 1 <= int(match[3]) <= LARGEST_PATCH:
        return None
    return (_vit if match[1] == "vit" else _deit)(match[2], int(match[3]))


def name_of(config: ViTConfig) -> str:
    """The name of a ViT of this size: `vit_b16`, or `vit_w…d…p…` if the size is not listed."""
    for name, listed in _CLIP.items():
        if config.stem == "clip" and _body(config) == _body(listed):
            return name
    if config.stem == "clip":
        return f"vit_w{config.width}d{config.depth}p{config.patch}"
    for name, listed in _DEIT3.items():
        if config.pos == "patches" and _body(config) == _body(listed):
            return name
    for name in (f"dinov2_{size}14" for size in "sblg"):
        if _body(config) == _body(_VITS[name]):
            return name
    for size, numbers in _VIT_SIZES.items():
        if numbers == (config.width, config.depth, config.heads, config.mlp) and config.act != "swiglu":
            return f"{'deit' if config.pool == 'cls_dist' else 'vit'}_{size}{config.patch}"
    return f"vit_w{config.width}d{config.depth}p{config.patch}"


def _body(c: ViTConfig) -> tuple[object, ...]:
    return c.width, c.depth, c.heads, c.mlp, c.act == "swiglu", c.patch, c.layer_scale > 0
