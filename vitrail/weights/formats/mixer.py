"""Mixer formats: timm (our names) and the authors' `.npz` files, which store kernels input first."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from vitrail.config import Size
from vitrail.errors import UserError
from vitrail.models.mixer import MixerConfig
from vitrail.weights.formats import HALF, Format, FormatSpec, identity, tensor_shape
from vitrail.weights.key_tables import count_blocks, inverse, key_table, new_name
from vitrail.weights.sidecar import Sidecar

_TOP = {"stem.proj": "stem", "norm": "pre_head_layer_norm", "head": "head"}
_BLOCK = {
    "norm1": "LayerNorm_0",
    "mlp_tokens.fc1": "token_mixing/Dense_0",
    "mlp_tokens.fc2": "token_mixing/Dense_1",
    "norm2": "LayerNorm_1",
    "mlp_channels.fc1": "channel_mixing/Dense_0",
    "mlp_channels.fc2": "channel_mixing/Dense_1",
}
_WHERE = "MixerBlock_{}/"


def _read_npz(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    depth = count_blocks(tensors, r"MixerBlock_(\d+)/")
    table = inverse(key_table(depth, _TOP, _BLOCK, _WHERE))
    state = {}
    for name in tensors:
        ours = new_name(re.sub("/(kernel|scale|bias)$", _kind, name), table)
        value = tensors[name]
        state[ours] = value.permute(3, 2, 0, 1) if value.ndim == 4 else value.T if value.ndim == 2 else value
    return state


def _kind(match: re.Match[str]) -> str:
    return ".bias" if match[1] == "bias" else ".weight"


def _write_npz(state: Mapping[str, Tensor], config: MixerConfig) -> dict[str, Tensor]:
    table = key_table(config.depth, _TOP, _BLOCK, _WHERE)
    named = {}
    for name, value in state.items():
        kind = "scale" if value.ndim == 1 else "kernel"
        theirs = new_name(name, table).replace(".weight", f"/{kind}").replace(".bias", "/bias")
        value = value.permute(2, 3, 1, 0) if value.ndim == 4 else value.T if value.ndim == 2 else value
        named[theirs] = value.contiguous()
    return named


_DEFAULTS = replace(HALF, crop=0.875)
FORMATS: dict[Format, FormatSpec] = {
    "timm": FormatSpec(r"blocks\.0\.mlp_tokens\.fc1\.weight", identity, identity, defaults=_DEFAULTS),
    "npz": FormatSpec(
        r"MixerBlock_0/token_mixing/Dense_0/kernel", _read_npz, _write_npz, defaults=_DEFAULTS, act="gelu_tanh"
    ),
}


def architecture(where: str, state: Mapping[str, Tensor], sidecar: Sidecar, model: MixerConfig | None) -> MixerConfig:
    """The configuration, from tensor shapes."""
    width, channels, patch, other = tensor_shape(where, "Mixer", state, "stem.proj.weight", 4)
    if patch != other:
        raise UserError(f"{where} has patches of {patch}x{other} pixels, but vitrail's are square.")
    mlp_tokens, tokens = tensor_shape(where, "Mixer", state, "blocks.0.mlp_tokens.fc1.weight", 2)
    return MixerConfig(
        width=width,
        depth=count_blocks(state, r"blocks\.(\d+)\."),
        mlp_tokens=mlp_tokens,
        mlp_channels=tensor_shape(where, "Mixer", state, "blocks.0.mlp_channels.fc1.weight", 2)[0],
        patch=patch,
        img_size=_img_size(where, tokens, patch, sidecar.img_size, model.img_size if model is not None else None),
        channels=channels,
        classes=tensor_shape(where, "Mixer", state, "head.weight", 2)[0] if "head.weight" in state else 0,
    )


def _img_size(where: str, tokens: int, patch: int, *candidates: Size | None) -> Size:
    """The image size with so many tokens: a candidate that fits, else a square."""
    for size in candidates:
        if size is not None and (size[0] // patch) * (size[1] // patch) == tokens:
            return size[0] // patch * patch, size[1] // patch * patch
    side = math.isqrt(tokens)
    if side**2 != tokens:
        raise UserError(
            f"{where} mixes {tokens} tokens, which fit no square image. Give `model` with its image size: "
            "vitrail.models.configure(NAME, img_size=…)."
        )
    return side * patch, side * patch
