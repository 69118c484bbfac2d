"""Every model by name: one dictionary of configurations, the other spellings, and `create`."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace

import torch
from torch.utils.flop_counter import FlopCounterMode

from vitrail.config import Size, coerce
from vitrail.errors import UserError, nearest
from vitrail.models.position import Interpolation, resample_state
from vitrail.models.vit import Pool, ViT, ViTConfig
from vitrail.verb import callable_package

Model = ViT
ModelConfig = ViTConfig

# Table 1 of the paper, Ti and S of DeiT and AugReg, g and G of "Scaling Vision Transformers", and our own
# nano for images of 8 to 96 pixels: width, depth, heads, mlp.
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
_LARGEST_PATCH = 32


def _vit(size: str, patch: int) -> ViTConfig:
    native = 32 if size == "nano" else 224
    side = max(round(native / patch), 1) * patch
    if size == "nano":
        return ViTConfig(*_VIT_SIZES[size], patch, (side, side), pool="gap", stem="conv")
    return ViTConfig(*_VIT_SIZES[size], patch, (side, side))


def _dinov2(size: str) -> ViTConfig:
    """DINOv2's: the paper's sizes with LayerScale, and a giant of its own with gated MLPs."""
    numbers = (1536, 40, 24, 4096) if size == "g" else _VIT_SIZES[size]
    return ViTConfig(*numbers, 14, (518, 518), act="swiglu" if size == "g" else "gelu", layer_scale=1e-5)


# The models that `vitrail models` lists. A ViT of any other patch size is built from its name alike.
CONFIGS: dict[str, ModelConfig] = {
    f"vit_{size}{patch}": _vit(size, patch)
    for size, patches in {
        "nano": (2, 4, 8),
        "ti": (16,),
        "s": (32, 16),
        "b": (32, 16, 8),
        "l": (32, 16, 14),
        "h": (14,),
        "giant": (14,),
        "gigantic": (14,),
    }.items()
    for patch in patches
} | {f"dinov2_{size}14": _dinov2(size) for size in "sblg"}

_WORDS = {"tiny": "ti", "small": "s", "base": "b", "large": "l", "huge": "h", "g": "giant"}
_TRAINED_ON = r"(?:[-_](?:in1k|in21k|in22k|imagenet\d*k?|i1k|i21k|pre|3rdparty))*"
_VIT_NAME = re.compile(
    r"(?:[\w.-]+/)?"  # the owner of a Hugging Face repository
    r"(?:(?:vit|deit)[-_]?)?(?P<size>nano|tiny|ti|small|s|base|b|large|l|huge|h|gigantic|giant|g)"
    r"(?P<distilled>[-_]distilled)?[-_/]?(?:patch|p)?(?P<patch>\d{1,2})"
    + _TRAINED_ON
    + r"(?:[-_](?P<img>\d{2,3})(?:px)?)?"
    + _TRAINED_ON
    + r"(?:\..*|-\d+ep.*?(?:-res_(?P<res>\d{2,3}))?(?:\.npz)?)?",  # timm's tag; the recipe in AugReg's file names
    re.IGNORECASE,
)
_DINOV2_NAME = re.compile(
    r"(?:[\w.-]+/)?(?:"
    r"dinov2_(?:vit)?(?P<authors>[sblg])14(?:_reg4?)?"
    r"|dinov2-(?:with-registers-)?(?P<hf>small|base|large|giant)(?:-imagenet1k-1-layer)?"
    r"|vit_(?P<timm>small|base|large|giant)_patch14(?:_reg4)?_dinov2(?:\..*)?)"
)


def canonical(name: str) -> tuple[str, ModelConfig]:
    """The short name and the configuration of a model, however the name is spelled.

    >>> canonical("google/vit-base-patch16-384")[0]
    'vit_b16'
    """
    if name in CONFIGS:
        return name, CONFIGS[name]
    if match := _DINOV2_NAME.fullmatch(name):
        size = (match["authors"] or match["hf"] or match["timm"])[0]
        registers = 4 if "reg" in name.rpartition("/")[2] else 0
        pool: Pool = "cls_gap" if name.endswith("-1-layer") else "cls"
        return f"dinov2_{size}14", replace(_dinov2(size), registers=registers, pool=pool)
    match = _VIT_NAME.fullmatch(name)
    if match and (re.search("vit|deit", name, re.IGNORECASE) or re.match(r"[A-Za-z]+[_/]\d", name)):
        size = "gigantic" if match["size"] == "G" else match["size"].lower()
        size, patch = _WORDS.get(size, size), int(match["patch"])
        if 1 <= patch <= _LARGEST_PATCH:
            config = _vit(size, patch)
            if match["distilled"]:
                config = replace(config, pool="cls_dist")
            if side := match["img"] or match["res"]:
                config = replace(config, img_size=(int(side), int(side)))
            return f"vit_{size}{patch}", config
    raise UserError(
        f"There is no model '{name}'.{nearest(name, CONFIGS)} `vitrail models` lists the models; a ViT may have "
        f"any patch size up to {_LARGEST_PATCH} in its name."
    )


def name_of(config: ModelConfig) -> str:
    """The name of a model of this size and patch; one of another size is called by its width and depth."""
    for name in (f"dinov2_{size}14" for size in "sblg"):
        if _body(config) == _body(CONFIGS[name]):
            return name
    for size, numbers in _VIT_SIZES.items():
        if numbers == (config.width, config.depth, config.heads, config.mlp) and config.act == "gelu":
            return f"vit_{size}{config.patch}"
    return f"vit_w{config.width}d{config.depth}p{config.patch}"


def _body(c: ModelConfig) -> tuple[object, ...]:
    return c.width, c.depth, c.heads, c.mlp, c.act, c.patch, c.layer_scale > 0


def configure(name: str, **changes: object) -> ModelConfig:
    """The configuration of a named model with some fields changed; unknown or ill-typed fields are a UserError."""
    _, config = canonical(name)
    known = {field.name: field for field in fields(config)}
    for key in changes:
        if key not in known:
            raise UserError(f"A model has no option '{key}'.{nearest(key, known)} It takes {', '.join(known)}.")
    values = {key: coerce(ViTConfig, key, value) for key, value in changes.items()}
    return replace(config, **values)


def build(config: ModelConfig) -> Model:
    """The model that a configuration describes, with fresh weights."""
    return ViT(config)


def create(name: str, **changes: object) -> Model:
    """A model with fresh weights: `create("vit_b16", classes=10, img_size=384, pool="gap")`."""
    return build(configure(name, **changes))


def resize(model: Model, img_size: int | Size, method: Interpolation = "bicubic") -> Model:
    """The same model for images of another size: its positions are resampled, everything else is kept."""
    config = replace(model.config, img_size=coerce(ViTConfig, "img_size", img_size))
    resized = build(config).to(model.head.weight)  # its device and type
    resized.load_state_dict(resample_state(model.state_dict(), model.config.grid, config.grid, method))
    return resized.train(model.training)


def parameters(config: ModelConfig) -> int:
    """The number of weights of a model, counted without allocating one."""
    with torch.device("meta"):
        return sum(p.numel() for p in build(config).parameters())


def macs(config: ModelConfig) -> int:
    """Multiply-accumulates of one forward pass of one image: what tables of ViTs call FLOPs."""
    with torch.device("meta"):
        model = build(config).eval()
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.empty(1, config.channels, *config.img_size))
    return counter.get_total_flops() // 2


@dataclass(frozen=True)
class Row:
    """One line of `vitrail models`."""

    name: str
    params: int
    macs: int
    tokens: int
    img_size: Size


def table(pattern: str = "") -> list[Row]:
    """Every listed model whose name contains `pattern`, counted without allocating a weight."""
    rows = [
        Row(name, parameters(config), macs(config), config.length, config.img_size)
        for name, config in CONFIGS.items()
        if pattern in name
    ]
    if not rows:
        raise UserError(f"No model has '{pattern}' in its name. `vitrail models` without a pattern lists them all.")
    return rows


callable_package(__name__, table)
