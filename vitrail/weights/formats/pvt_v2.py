"""PVT v2 formats: timm's `PyramidVisionTransformerV2`, transformers' `PvtV2ForImageClassification`, the authors' files.

transformers has one epsilon for all norms; the authors, timm and we use 1e-5 in the norms of patches and keys. Weights
with a transformers `config.json` keep its epsilon, so that their outputs do not change.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from vitrail.errors import UserError
from vitrail.models.pvt_v2 import CONFIGS, PVTv2Config
from vitrail.weights.formats import IMAGENET, Format, FormatSpec, from_stages, tensor_shape, to_stages
from vitrail.weights.formats.pvt import DEFAULTS, count_depths, count_heads, hf_pyramid, key_eps, pyramid, strides
from vitrail.weights.formats.pvt import hf_fields as hf_fields  # the same fields
from vitrail.weights.key_tables import fuse, inverse, rename, split_qkv
from vitrail.weights.sidecar import Sidecar

_HF_BLOCK = {
    "norm1": "layer_norm_1",
    "attn.q": "attention.query",
    "attn.k": "attention.key",
    "attn.v": "attention.value",
    "attn.sr": "attention.spatial_reduction",
    "attn.norm": "attention.layer_norm",
    "attn.proj": "attention.proj",
    "norm2": "layer_norm_2",
    "mlp.fc1": "mlp.dense1",
    "mlp.dwconv": "mlp.dwconv.dwconv",
    "mlp.fc2": "mlp.dense2",
}
_ORIGINAL = {"patch_embed": "downsample", "block": "blocks", "norm": "norm"}


def _table(depths: Sequence[int]) -> dict[str, str]:
    """The key table for transformers."""
    table = {"head": "classifier"}
    for i, depth in enumerate(depths):
        layer = f"encoder.layers.{i}"
        patches = f"layers.{i}.downsample" if i else "patch_embed"
        table[f"{patches}.proj"] = f"{layer}.patch_embedding.proj"
        table[f"{patches}.norm"] = f"{layer}.patch_embedding.layer_norm"
        table[f"layers.{i}.norm"] = f"{layer}.layer_norm"
        for j in range(depth):
            table |= {f"layers.{i}.blocks.{j}.{ours}": f"{layer}.blocks.{j}.{it}" for ours, it in _HF_BLOCK.items()}
    return table


def _read_hf(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return fuse(rename(tensors, inverse(_table(count_depths(tensors, "encoder.layers.{}.blocks.")))), "kv")


def _write_hf(state: Mapping[str, Tensor], config: PVTv2Config) -> dict[str, Tensor]:
    named = rename(split_qkv(state, "kv"), _table(config.depths))
    return {name if name.startswith("classifier.") else f"pvt_v2.{name}": value for name, value in named.items()}


def _read_original(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The authors count stages from 1 and store patches, blocks and norms of all stages at the top level."""

    def ours(name: str) -> str:
        name = re.sub(r"^patch_embed1\.", "patch_embed.", name).replace(".mlp.dwconv.dwconv.", ".mlp.dwconv.")
        return re.sub(
            r"^(patch_embed|block|norm)(\d+)\.", lambda it: f"layers.{int(it[2]) - 1}.{_ORIGINAL[it[1]]}.", name
        )

    return {ours(name): tensors[name] for name in tensors}


def _unsupported_timm(config: PVTv2Config) -> str | None:
    return None if config.patch == 4 else f"a first patch size of {config.patch}"


FORMATS: dict[Format, FormatSpec] = {
    "timm": FormatSpec(
        r"(?:stages|layers)\.0\.blocks\.0\.mlp\.dwconv\.weight", from_stages, to_stages, _unsupported_timm, IMAGENET
    ),
    "hf": FormatSpec(r"encoder\.layers\.0\.patch_embedding\.proj\.weight", _read_hf, _write_hf, defaults=DEFAULTS),
    "original": FormatSpec(r"block1\.0\.mlp\.dwconv\.dwconv\.weight", _read_original, defaults=DEFAULTS),
}


def architecture(where: str, state: Mapping[str, Tensor], sidecar: Sidecar, model: PVTv2Config | None) -> PVTv2Config:
    """The configuration, from tensor shapes; these fit any image size, by default 224."""
    _, channels, kernel, other = tensor_shape(where, "PVT v2", state, "patch_embed.proj.weight", 4)
    if kernel != other or kernel % 2 == 0:
        raise UserError(f"{where} has {kernel}x{other} filters in its stem, but those of a PVT v2 are odd squares.")
    seen = pyramid(where, state, "layers.{}.blocks.")
    known = {config.widths: config for config in CONFIGS.values()}
    usual = {widths: config.heads for widths, config in known.items()}
    heads = count_heads(where, seen["widths"], usual, sidecar, model)
    linear = seen["reductions"][0] == 1 and "layers.0.blocks.0.attn.sr.weight" in state
    if linear:  # with 1x1 filters, and `reductions` unused
        halved = tuple(2**i for i in reversed(range(len(seen["widths"]))))
        seen["reductions"] = halved if model is None else model.reductions
    size = known[seen["widths"]].img_size if seen["widths"] in known else (224, 224)
    return PVTv2Config(
        **seen,
        heads=heads,
        linear=linear,
        patch=(kernel + 1) // 2,
        img_size=sidecar.img_size or (size if model is None else model.img_size),
        channels=channels,
        classes=tensor_shape(where, "PVT v2", state, "head.weight", 2)[0] if "head.weight" in state else 0,
        eps=key_eps(sidecar, model),
    )


def hf_config(config: PVTv2Config) -> dict[str, Any]:
    """The architecture for transformers' `config.json`."""
    return {
        "architectures": ["PvtV2ForImageClassification"],
        "model_type": "pvt_v2",
        "sr_ratios": list(config.reductions),
        "patch_sizes": [2 * stride - 1 for stride in strides(config)],
        "linear_attention": config.linear,
        **hf_pyramid(config),
    }
