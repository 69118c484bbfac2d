"""Every model by name: one dictionary of configurations, the other spellings, and `create`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from vitrail.config import Size, coerce
from vitrail.errors import UserError, nearest
from vitrail.models import aliases, bit, coatnet, hybrid, mixer, pvt, pvt_v2, swin
from vitrail.models.bit import BiT, BiTConfig
from vitrail.models.coatnet import CoAtNet, CoAtNetConfig
from vitrail.models.hybrid import Hybrid, HybridConfig
from vitrail.models.mixer import Mixer, MixerConfig
from vitrail.models.position import Interpolation, resample_state
from vitrail.models.pvt import PVT, PVTConfig
from vitrail.models.pvt_v2 import PVTv2, PVTv2Config
from vitrail.models.swin import Swin, SwinConfig
from vitrail.models.vit import ViT, ViTConfig

# Every configuration has img_size, channels, classes, drop and drop_path; `width` of the features; `grid`, the rows and
# columns of what is pooled in the end, and `length` in tokens. Every model has config, embed, forward and stages.
Model = ViT | Hybrid | BiT | Mixer | Swin | PVT | PVTv2 | CoAtNet
ModelConfig = ViTConfig | HybridConfig | BiTConfig | MixerConfig | SwinConfig | PVTConfig | PVTv2Config | CoAtNetConfig

# The name of every family, as model cards have it, with the type of its configurations and models.
FAMILIES: dict[str, tuple[type[Any], Callable[[Any], Model]]] = {
    "vit": (ViTConfig, ViT),
    "hybrid": (HybridConfig, Hybrid),
    "bit": (BiTConfig, BiT),
    "mixer": (MixerConfig, Mixer),
    "swin": (SwinConfig, Swin),
    "pvt": (PVTConfig, PVT),
    "pvt_v2": (PVTv2Config, PVTv2),
    "coatnet": (CoAtNetConfig, CoAtNet),
}

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


def _deit(size: str, patch: int) -> ViTConfig:
    """DeiT's, which learn from a teacher: a distillation token with a head of its own."""
    return replace(_vit(size, patch), pool="cls_dist")


def _deit3(size: str, patch: int) -> ViTConfig:
    """DeiT III's: LayerScale, and no position for the class token."""
    numbers = (512, 12, 8, 2048) if size == "m" else _VIT_SIZES[size]
    return ViTConfig(*numbers, patch, pos="patches", layer_scale=1e-6)


_DEIT = {f"deit_nano{patch}": _deit("nano", patch) for patch in _PATCHES["nano"]} | {
    f"deit_{size}16": _deit(size, 16) for size in ("ti", "s", "b")
}
_DEIT3 = {
    f"deit3_{size}{patch}": _deit3(size, patch) for size, patch in zip("smblh", (16, 16, 16, 16, 14), strict=True)
}
_VITS = {f"vit_{size}{patch}": _vit(size, patch) for size, patches in _PATCHES.items() for patch in patches} | {
    f"dinov2_{size}14": _dinov2(size) for size in "sblg"
}

# The models that `vitrail models` lists. A ViT of any other patch size is built from its name alike.
CONFIGS: dict[str, ModelConfig] = {
    **_VITS,
    **_DEIT,
    **_DEIT3,
    **hybrid.CONFIGS,
    **bit.CONFIGS,
    **mixer.CONFIGS,
    **swin.CONFIGS,
    **pvt.CONFIGS,
    **pvt_v2.CONFIGS,
    **coatnet.CONFIGS,
}


def canonical(name: str) -> tuple[str, ModelConfig]:
    """The short name and the configuration of a model, however the name is spelled.

    >>> canonical("google/vit-base-patch16-384")[0]
    'vit_b16'
    """
    short, changes = (name, {}) if name in CONFIGS else aliases.find(name) or ("", {})
    config = CONFIGS.get(short) or _of_any_patch(short)
    if config is None:
        raise UserError(
            f"There is no model '{name}'.{nearest(name, CONFIGS)} `vitrail models` lists the models; a ViT may have "
            f"any patch size up to {_LARGEST_PATCH} in its name."
        )
    return short, replace(config, **changes)


def _of_any_patch(short: str) -> ViTConfig | None:
    match = re.fullmatch(r"(vit|deit)_([a-z]+)(\d+)", short)
    if match is None or not 1 <= int(match[3]) <= _LARGEST_PATCH:
        return None
    return (_vit if match[1] == "vit" else _deit)(match[2], int(match[3]))


def is_meant(name: str, asked: str) -> bool:
    """Whether a model, by its short name, is the one that is asked for by any spelling, or one of the family."""
    if asked == "deit":
        return name.startswith("deit_")
    if asked in FAMILIES:  # what is not listed is called by its family, or is a ViT of another size
        return asked == (family(CONFIGS[name]) if name in CONFIGS else name if name in FAMILIES else "vit")
    return name == asked or name == canonical(asked)[0]


_ANY = ("img_size", "channels", "classes", "drop", "drop_path", "eps")  # of any value under the name of a model


def family(config: ModelConfig) -> str:
    """The name of a model's family."""
    return next(name for name, (kind, _) in FAMILIES.items() if isinstance(config, kind))


def shape(config: ModelConfig) -> dict[str, Any]:
    """What makes a model that of its name: all but what it may have of any value."""
    return {field.name: getattr(config, field.name) for field in fields(config) if field.name not in _ANY}


def name_of(config: ModelConfig) -> str:
    """The name of a model of this size; one of another size is called by its family, a ViT by its width and depth."""
    if not isinstance(config, ViTConfig):
        for name, other in CONFIGS.items():
            if type(other) is type(config) and shape(other) == shape(config):
                return name
        return family(config)
    for name, listed in _DEIT3.items():
        if config.pos == "patches" and _body(config) == _body(listed):
            return name
    for name in (f"dinov2_{size}14" for size in "sblg"):
        if _body(config) == _body(_VITS[name]):
            return name
    for size, numbers in _VIT_SIZES.items():
        if numbers == (config.width, config.depth, config.heads, config.mlp) and config.act == "gelu":
            return f"{'deit' if config.pool == 'cls_dist' else 'vit'}_{size}{config.patch}"
    return f"vit_w{config.width}d{config.depth}p{config.patch}"


def _body(c: ViTConfig) -> tuple[object, ...]:
    return c.width, c.depth, c.heads, c.mlp, c.act, c.patch, c.layer_scale > 0


def configure(name: str, **changes: object) -> ModelConfig:
    """The configuration of a named model with some fields changed; unknown or ill-typed fields are a UserError."""
    _, config = canonical(name)
    known = {field.name: field for field in fields(config)}
    for key in changes:
        if key not in known:
            raise UserError(f"A model has no option '{key}'.{nearest(key, known)} It takes {', '.join(known)}.")
    values = {key: coerce(type(config), key, value) for key, value in changes.items()}
    return replace(config, **values)


def build(config: ModelConfig) -> Model:
    """The model that a configuration describes, with fresh weights."""
    return FAMILIES[family(config)][1](config)


def create(name: str, **changes: object) -> Model:
    """A model with fresh weights: `create("vit_b16", classes=10, img_size=384, pool="gap")`."""
    return build(configure(name, **changes))


def resize(model: Model, img_size: int | Size, method: Interpolation = "bicubic") -> Model:
    """The same model for images of another size: its positions are resampled, everything else is kept."""
    config = replace(model.config, img_size=coerce(type(model.config), "img_size", img_size))
    resized = build(config).to(head(model).weight)  # its device and type
    resized.load_state_dict(resized_state(model.state_dict(), model.config, config, method))
    return resized.train(model.training)


def resized_state(
    state: Mapping[str, Tensor], old: ModelConfig, new: ModelConfig, method: Interpolation = "bicubic"
) -> dict[str, Tensor]:
    """A copy of a model's weights that fits another image size; what need not change is the same tensor."""
    if isinstance(old, MixerConfig) and old.grid != new.grid:
        raise UserError(
            f"A Mixer has a weight for every patch, so it serves one image size, {old.img_size[0]}x{old.img_size[1]}; "
            f"asked for was {new.img_size[0]}x{new.img_size[1]}. Keep the size, or train a new one."
        )
    if isinstance(old, (ViTConfig, HybridConfig)):
        return resample_state(state, old.grid, new.grid, method)
    if isinstance(old, PVTConfig) and isinstance(new, PVTConfig):
        return pvt.resample_positions(state, old, new, method)
    if isinstance(old, CoAtNetConfig) and isinstance(new, CoAtNetConfig):
        return coatnet.resample_biases(state, old, new, method)
    return dict(state)  # the others know no places


def head(model: Model) -> nn.Linear | nn.Conv2d:
    """The last layer, which tells the classes apart."""
    return model.head if isinstance(model.head, nn.Linear) else model.head.fc


def heads(model: Model) -> list[nn.Linear | nn.Conv2d]:
    """The classification layers: one, or two in a model with a distillation token."""
    second = model.head_dist if isinstance(model, ViT) else None
    return [head(model)] if second is None else [head(model), second]


def head_outputs(model: Model, images: Tensor) -> list[Tensor]:
    """The outputs of each of the `heads`, (B, K) each; `forward` gives their mean."""
    if isinstance(model, ViT) and model.head_dist is not None:
        return list(model.heads(images))
    return [model(images)]


def filters(state: Mapping[str, Tensor]) -> str:
    """Which of a model's weights read the image: those of the first convolution, in every family."""
    return next(name for name, value in state.items() if value.ndim == 4)


def step(config: ModelConfig) -> int:
    """What the sides of the images must be multiples of."""
    if isinstance(config, (HybridConfig, PVTConfig)):
        return config.stride
    return config.patch if isinstance(config, (ViTConfig, MixerConfig)) else 1


@cache
def parameters(config: ModelConfig) -> int:
    """The number of weights of a model, counted without allocating one."""
    with torch.device("meta"):
        return sum(p.numel() for p in build(config).parameters())


@cache
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


def rows(pattern: str = "") -> Iterator[Row]:
    """Every listed model whose name contains `pattern`, one by one: counting them all takes a while."""
    chosen = {name: config for name, config in CONFIGS.items() if pattern in name}
    if not chosen:
        raise UserError(f"No model has '{pattern}' in its name. `vitrail models` without a pattern lists them all.")
    return (Row(name, parameters(c), macs(c), c.length, c.img_size) for name, c in chosen.items())
