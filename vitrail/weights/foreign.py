"""Weights of others: which format they have, which architecture, and what vitrail's own models make of them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal, get_args

import torch
from torch import Tensor

from vitrail.config import Size
from vitrail.data.preprocess import Preprocess, Resizing
from vitrail.errors import UserError, some
from vitrail.models import ModelConfig, canonical, name_of
from vitrail.models.vit import Pool, ViTConfig
from vitrail.weights import hf, npz, timm, torchvision
from vitrail.weights.beside import Beside, read_json
from vitrail.weights.tensors import Tensors

Format = Literal["timm", "hf", "npz", "torchvision"]
_Normal = tuple[tuple[float, ...], tuple[float, ...]]  # mean and std
FORMATS: dict[Format, ModuleType] = {"timm": timm, "hf": hf, "npz": npz, "torchvision": torchvision}

# The usual number of heads of a width, by the tables of the papers.
_HEADS = {192: 3, 384: 6, 768: 12, 1024: 16, 1152: 16, 1280: 16, 1408: 16, 1536: 24, 1664: 16}
_LAYER_SCALE = 1e-5  # its first value, which trained weights have replaced
_IMAGENET: _Normal = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_HALF: _Normal = ((0.5,), (0.5,))
_WRAPPERS = re.compile(r"^(?:module\.|_orig_mod\.)+")
# What only pre-training needs: mask tokens, MAE's decoder, the projection heads of DINO and iBOT.
_PRETRAINING = re.compile(r"(mask_token|decoder[._]|head\.(mlp|last_layer)|(dino|ibot)_head|student\.)")


@dataclass(frozen=True)
class Weights:
    """Tensors of a known format, not yet read."""

    where: str
    format: Format
    tensors: Tensors

    def shapes(self, config: ModelConfig | None = None) -> dict[str, Tensor]:
        """Every tensor under our name, on the meta device."""
        return self._translate(self.tensors.shapes, config)

    def read(self, config: ModelConfig) -> dict[str, Tensor]:
        """Every tensor under our name, for a model of this configuration."""
        return self._translate(self.tensors, config)

    def _translate(self, tensors: Mapping[str, Tensor], config: ModelConfig | None) -> dict[str, Tensor]:
        try:
            state = FORMATS[self.format].read(tensors)
            return _settle(state, config) if isinstance(config, ViTConfig) else state
        except (RuntimeError, ValueError, IndexError, KeyError) as error:  # what torch says of shapes that are no ViT's
            line = str(error).splitlines()[0].rstrip(".")
            raise UserError(f"{self.where} does not have the shapes of a ViT: {line}.") from error


def recognise(tensors: Tensors, where: str) -> Weights:
    """The format of some tensors, by their names."""
    plain = {_WRAPPERS.sub("", name): name for name in tensors}
    found: dict[str, Format] = {}  # prefixes, such as "vit." or "backbone."
    for format, module in FORMATS.items():
        pattern = re.compile(rf"(|.*[./]){re.escape(module.MARKER)}")
        found |= {match[1]: format for name in plain if (match := pattern.fullmatch(name))}
    if not found:
        held = some(sorted(plain), 4)
        raise UserError(f"{where} is no ViT of {', '.join(get_args(Format))} or vitrail: it holds {held}.")
    if len(found) > 1:
        raise UserError(f"{where} holds several models: {some(sorted(found), 6)}. Give the state dict of one of them.")
    (prefix, format), *_ = found.items()
    names = {name.removeprefix(prefix): old for name, old in plain.items()}
    shapes = {name: tensors.shapes[old] for name, old in names.items()}
    return Weights(where, format, Tensors(shapes, lambda name: tensors[names[name]], tensors.wrapped))


def settings(format: Format, folder: Path | None) -> Beside:
    """What the files in a folder say of the weights there."""
    if folder is None:
        return Beside()
    path = folder / "config.json"
    document = read_json(path)
    try:
        if "pretrained_cfg" in document:
            return timm.settings(document)
        if "model_type" in document and format == "hf":
            return hf.settings(document, read_json(folder / "preprocessor_config.json"))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path} does not say what it should: {error!r}.") from error
    return Beside()


def architecture(weights: Weights, beside: Beside, model: ViTConfig | None) -> ViTConfig:
    """The architecture that tensors have, by their shapes; `classes` is 1 where there is no head."""
    state = weights.shapes()
    width, channels, patch, other = _sizes(weights, state, "patch_embed.proj.weight", 4)
    if any("patch_embed.convs" in name or "patch_embed.backbone" in name for name in state):
        raise UserError(f"{weights.where} has a convolutional stem: its model.json is needed beside it.")
    if patch != other:
        raise UserError(f"{weights.where} has patches of {patch}x{other} pixels; vitrail's are squares.")
    depth = len({match[1] for name in state if (match := re.match(r"blocks\.(\d+)\.", name))})
    hidden = _sizes(weights, state, "blocks.0.mlp.fc1.weight", 2)[0]
    read = {_sizes(weights, state, name, 2)[1] for name in state if name.endswith(".mlp.fc2.weight")}
    gated = read == {hidden / 2}
    mlp = hidden // 2 if gated else hidden
    if model is not None:
        seen = {"width": width, "depth": depth, "mlp": mlp, "patch": patch}
        _compare(weights, seen, {name: getattr(model, name) for name in seen})
    pool = _pool(state, width)
    if pool == "cls" and "head.weight" not in state and model is not None and model.pool == "cls_gap":
        pool = "cls_gap"  # what a head reads is seen from its shape alone
    registers = _tokens(state, "reg_token") + (_tokens(state, "dist_token") if pool != "cls_dist" else 0)
    asked = model.img_size if model is not None and model.patch == patch else None
    placed = ("cls_token" in state) + (pool == "cls_dist")
    size = _img_size(weights, state, (0, placed, placed + registers), patch, beside.img_size, asked)
    return ViTConfig(
        width=width,
        depth=depth,
        heads=_heads(weights, width, beside, model),
        mlp=mlp,
        patch=patch,
        img_size=size,
        channels=channels,
        classes=_sizes(weights, state, "head.weight", 2)[0] if "head.weight" in state else 1,
        pool=pool,
        head="tanh" if "pre_logits.weight" in state else "linear",
        act="swiglu" if gated else "gelu",
        registers=registers,
        layer_scale=_LAYER_SCALE if "blocks.0.ls1.gamma" in state else 0.0,
    )


def expected(model: str | ModelConfig | None) -> ViTConfig | None:
    """The architecture that somebody says the weights have."""
    config = canonical(model)[1] if isinstance(model, str) else model
    if config is not None and not isinstance(config, ViTConfig):
        raise UserError(f"Weights without a model.json are read if they are a ViT's, but `model` is {name_of(config)}.")
    return config


def preprocessing(weights: Weights, config: ViTConfig, beside: Beside) -> tuple[Preprocess, str | None]:
    """How images must be prepared, and a sentence if only the habits of the family say it."""
    # DeiT and MAE come as {"model": …}, DINO and DINOv2 without a head: all are of one house.
    facebook = weights.tensors.wrapped[:1] in (("model",), ("teacher",)) or "head.weight" not in weights.tensors
    facebook = facebook and weights.format == "timm"
    imagenet = facebook or weights.format == "torchvision" or config.layer_scale > 0 or config.pool == "cls_dist"
    mean, std = _IMAGENET if imagenet and config.channels == 3 else _HALF
    crop = 0.875 if imagenet else 0.9
    crop = 1.0 if max(config.img_size) >= 384 else crop
    bilinear = weights.format == "torchvision" or (weights.format == "hf" and not config.layer_scale)
    interpolation: Resizing = "bilinear" if bilinear else "bicubic"
    assumed = []
    if beside.mean is not None and beside.std is not None and len(beside.mean) in (1, config.channels):
        mean, std = beside.mean, beside.std
    else:
        assumed += [f"mean {mean[0]:g}", f"std {std[0]:g}"]
    if beside.crop is None:
        assumed += [f"crop {crop:g}"]
    if beside.interpolation is None:
        assumed += [f"{interpolation} resizing"]
    note = f"{', '.join(assumed)}: as usual for such weights, nothing beside them says it" if assumed else None
    crop, interpolation = beside.crop or crop, beside.interpolation or interpolation
    return Preprocess(config.img_size, config.channels, crop, mean, std, interpolation=interpolation), note


def turned(weights: Weights, config: ViTConfig) -> list[str]:
    """A sentence on a distillation token that has no head, which is a register here."""
    alone = "dist_token" in weights.shapes() and config.pool != "cls_dist"
    return ["dist_token became a register: it has no head"] if alone else []


def pretraining(names: Mapping[str, Tensor]) -> list[str]:
    """Those of some names that belong to what only pre-training needs."""
    return [name for name in names if _PRETRAINING.match(name)]


def _settle(state: dict[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
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


def _sizes(weights: Weights, state: Mapping[str, Tensor], name: str, dimensions: int) -> tuple[int, ...]:
    if name not in state:
        raise UserError(f"{weights.where} is no whole ViT: {name} is missing.")
    shape = tuple(state[name].shape)
    if len(shape) != dimensions or min(shape) < 1:
        raise UserError(f"{weights.where} is no ViT: {name} is {shape}, but it must have {dimensions} dimensions.")
    return shape


def _img_size(
    weights: Weights, state: Mapping[str, Tensor], others: tuple[int, ...], patch: int, *said: Size | None
) -> Size:
    """The image size that the positions are for: as somebody says if that fits, else of a square.

    `others` says how many of the positions may be those of tokens that are no patch.
    """
    rows = _sizes(weights, state, "pos_embed", 3)[1]
    counts = {rows - prefix for prefix in others} - {0}
    for size in said:
        if size is not None and (size[0] // patch) * (size[1] // patch) in counts:
            return size[0] // patch * patch, size[1] // patch * patch
    sides = sorted({math.isqrt(count) for count in counts if count > 0 and math.isqrt(count) ** 2 == count})
    if len(sides) == 1:
        return sides[0] * patch, sides[0] * patch
    squares = f"squares of {' or '.join(f'{side}x{side}' for side in sides)}" if sides else "no square"
    raise UserError(
        f"{weights.where} has {rows} positions, which are {squares} of patches. Give the model with its image size: "
        "`model` may be a configuration, vitrail.models.configure(NAME, img_size=…)."
    )


def _heads(weights: Weights, width: int, beside: Beside, model: ViTConfig | None) -> int:
    shown = npz.heads(weights.tensors.shapes) if weights.format == "npz" else beside.heads
    if shown and model is not None:
        _compare(weights, {"heads": shown}, {"heads": model.heads})
    told = shown or (model.heads if model is not None else _HEADS.get(width))
    if told is None:
        candidates = [str(heads) for heads in range(1, width + 1) if width % heads == 0 and width // heads >= 8]
        raise UserError(
            f"{weights.where} is a ViT of width {width}, whose number of heads its tensors do not show: it may be "
            f"{some(candidates, 12)}. Put a config.json beside it, or give `model`."
        )
    return told


def _compare(weights: Weights, seen: Mapping[str, int], asked: Mapping[str, int]) -> None:
    for name, value in seen.items():
        if asked[name] != value:
            raise UserError(f"{weights.where} has {name} {value}, but `model` asks for {asked[name]}.")
