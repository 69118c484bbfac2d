"""Mixers in the formats of others: timm, whose names are ours, and the `.npz` files of the authors.

Their kernels are stored input first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from vitrail.config import Size
from vitrail.errors import UserError
from vitrail.models.mixer import MixerConfig
from vitrail.weights.formats import HALF, Format, Layout, same, sizes
from vitrail.weights.key_tables import count_blocks, inverse, new_name, stems
from vitrail.weights.sidecar import Beside

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
    table = inverse(stems(depth, _TOP, _BLOCK, _WHERE))
    state = {}
    for name in tensors:
        name_here = new_name(re.sub("/(kernel|scale|bias)$", _kind, name), table)
        value = tensors[name]
        state[name_here] = value.permute(3, 2, 0, 1) if value.ndim == 4 else value.T if value.ndim == 2 else value
    return state


def _kind(match: re.Match[str]) -> str:
    return ".bias" if match[1] == "bias" else ".weight"


def _write_npz(state: Mapping[str, Tensor], config: MixerConfig) -> dict[str, Tensor]:
    table = stems(config.depth, _TOP, _BLOCK, _WHERE)
    named = {}
    for name, value in state.items():
        kind = "scale" if value.ndim == 1 else "kernel"
        theirs = new_name(name, table).replace(".weight", f"/{kind}").replace(".bias", "/bias")
        value = value.permute(2, 3, 1, 0) if value.ndim == 4 else value.T if value.ndim == 2 else value
        named[theirs] = value.contiguous()
    return named


_HABIT = replace(HALF, crop=0.875)
LAYOUTS: dict[Format, Layout] = {
    "timm": Layout(r"blocks\.0\.mlp_tokens\.fc1\.weight", same, same, habit=_HABIT),
    "npz": Layout(r"MixerBlock_0/token_mixing/Dense_0/kernel", _read_npz, _write_npz, habit=_HABIT),
}


def architecture(where: str, state: Mapping[str, Tensor], beside: Beside, model: MixerConfig | None) -> MixerConfig:
    """The architecture that tensors have, by their shapes."""
    width, channels, patch, other = sizes(where, "Mixer", state, "stem.proj.weight", 4)
    if patch != other:
        raise UserError(f"{where} has patches of {patch}x{other} pixels; vitrail's are squares.")
    mlp_tokens, tokens = sizes(where, "Mixer", state, "blocks.0.mlp_tokens.fc1.weight", 2)
    return MixerConfig(
        width=width,
        depth=count_blocks(state, r"blocks\.(\d+)\."),
        mlp_tokens=mlp_tokens,
        mlp_channels=sizes(where, "Mixer", state, "blocks.0.mlp_channels.fc1.weight", 2)[0],
        patch=patch,
        img_size=_img_size(where, tokens, patch, beside.img_size, model.img_size if model is not None else None),
        channels=channels,
        classes=sizes(where, "Mixer", state, "head.weight", 2)[0] if "head.weight" in state else 0,
    )


def _img_size(where: str, tokens: int, patch: int, *said: Size | None) -> Size:
    """The image size that has so many tokens: as somebody says if that fits, else of a square."""
    for size in said:
        if size is not None and (size[0] // patch) * (size[1] // patch) == tokens:
            return size[0] // patch * patch, size[1] // patch * patch
    side = math.isqrt(tokens)
    if side**2 != tokens:
        raise UserError(
            f"{where} mixes {tokens} tokens, which are no square of patches. Give the model with its image size: "
            "`model` may be a configuration, vitrail.models.configure(NAME, img_size=…)."
        )
    return side * patch, side * patch
