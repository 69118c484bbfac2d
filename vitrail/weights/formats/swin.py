"""Swin formats: timm, Hugging Face's `SwinForImageClassification`, and the authors' files.

timm, like us, merges patches at the start of a stage; the authors and Hugging Face at the end of the previous one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from vitrail.config import Size
from vitrail.errors import UserError
from vitrail.models.swin import SwinConfig
from vitrail.weights.formats import IMAGENET, Format, FormatSpec, identity, tensor_shape
from vitrail.weights.formats.hf import check_act
from vitrail.weights.key_tables import Table, count_blocks, fuse, inverse, rename, split_qkv
from vitrail.weights.sidecar import Sidecar

_BUFFERS = re.compile(r".*\.(relative_position_index|attn_mask)")  # recomputed by every model
_TABLE = "layers.0.blocks.0.attn.relative_position_bias_table"
_MERGE = ("norm", "reduction")  # the modules of patch merging

_HF_TOP = {
    "patch_embed.proj": "embeddings.patch_embeddings.projection",
    "patch_embed.norm": "embeddings.norm",
    "mask_token": "embeddings.mask_token",
    "norm": "layernorm",
    "head.fc": "classifier",
}
_HF_BLOCK = {
    "norm1": "layernorm_before",
    "attn.relative_position_bias_table": "attention.self.relative_position_bias_table",
    "attn.q": "attention.self.query",
    "attn.k": "attention.self.key",
    "attn.v": "attention.self.value",
    "attn.proj": "attention.output.dense",
    "norm2": "layernorm_after",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}
_HF_MODULES = {  # module names of transformers 5
    "attn.relative_position_bias_table": "attention.relative_position_bias.relative_position_bias_table",
    "attn.q": "attention.q_proj",
    "attn.k": "attention.k_proj",
    "attn.v": "attention.v_proj",
    "attn.proj": "attention.o_proj",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}


def _read(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensors[name] for name in tensors if not _BUFFERS.fullmatch(name)}


def _read_original(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    table = {"head": "head.fc"}
    for i in range(len(_depths(tensors, ""))):
        table |= {f"layers.{i}.downsample.{part}": f"layers.{i + 1}.downsample.{part}" for part in _MERGE}
    return rename(_read(tensors), table)


def _hf_table(depths: Sequence[int], block: Table) -> dict[str, str]:
    table = dict(_HF_TOP)
    for i, depth in enumerate(depths):
        where = f"encoder.layers.{i}."
        table |= {f"layers.{i + 1}.downsample.{part}": f"{where}downsample.{part}" for part in _MERGE}
        for j in range(depth):
            table |= {f"layers.{i}.blocks.{j}.{ours}": f"{where}blocks.{j}.{name}" for ours, name in block.items()}
    return table


def _read_hf(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    depths = _depths(tensors, r"encoder\.")
    table = inverse(_hf_table(depths, _HF_BLOCK)) | inverse(_hf_table(depths, _HF_MODULES))
    return fuse(rename(_read(tensors), table))


def _write_hf(state: Mapping[str, Tensor], config: SwinConfig) -> dict[str, Tensor]:
    named = rename(split_qkv(state), _hf_table(config.depths, _HF_BLOCK))
    return {name if name.startswith("classifier.") else f"swin.{name}": value for name, value in named.items()}


def _unsupported_timm(config: SwinConfig) -> str | None:
    """timm shrinks a window that is larger than the map."""
    h, w = config.grid
    return f"a map of {h}x{w} in windows of {config.window}" if min(h, w) < config.window else None


def _unsupported_hf(config: SwinConfig) -> str | None:
    """Hugging Face pads a map before the shift, not after, and shifts it in both directions or in none."""
    if config.widths != tuple(config.widths[0] * 2**i for i in range(len(config.widths))):
        return f"the widths {config.widths}, which do not double"
    n = config.window
    for h, w in config.grids:
        if h % n or w % n or min(h, w) <= n < max(h, w):
            return f"a map of {h}x{w} in windows of {n}"
    return None


FORMATS: dict[Format, FormatSpec] = {
    "hf": FormatSpec(
        r"encoder\.layers\.0\.blocks\.0\.attention\.(?:self|relative_position_bias)\.relative_position_bias_table",
        _read_hf,
        _write_hf,
        _unsupported_hf,
        replace(IMAGENET, crop=1.0),
        eps=1e-5,
    ),
    "original": FormatSpec(
        r"layers\.0\.downsample\.reduction\.weight", _read_original, defaults=replace(IMAGENET, crop=0.875)
    ),
    "timm": FormatSpec(re.escape(_TABLE), _read, identity, _unsupported_timm, IMAGENET),
}


def architecture(where: str, state: Mapping[str, Tensor], sidecar: Sidecar, model: SwinConfig | None) -> SwinConfig:
    """The configuration, from tensor shapes; these fit any image size."""
    _, channels, patch, other = tensor_shape(where, "Swin", state, "patch_embed.proj.weight", 4)
    if patch != other:
        raise UserError(f"{where} has patches of {patch}x{other} pixels, but vitrail's are square.")
    depths = _depths(state, "")
    widths, heads = [], []
    for i in range(len(depths)):
        widths.append(tensor_shape(where, "Swin", state, f"layers.{i}.blocks.0.attn.proj.weight", 2)[0])
        rows, count = tensor_shape(where, "Swin", state, f"layers.{i}.blocks.0.attn.relative_position_bias_table", 2)
        heads.append(count)
        if rows != math.isqrt(rows) ** 2 or rows % 2 == 0:
            raise UserError(f"{where} has {rows} position biases in stage {i + 1}, which fit no square window.")
    window = (math.isqrt(tensor_shape(where, "Swin", state, _TABLE, 2)[0]) + 1) // 2
    return SwinConfig(
        widths=tuple(widths),
        depths=tuple(depths),
        heads=tuple(heads),
        window=window,
        patch=patch,
        img_size=sidecar.img_size or (model.img_size if model is not None else _img_size(window)),
        channels=channels,
        classes=tensor_shape(where, "Swin", state, "head.fc.weight", 2)[0] if "head.fc.weight" in state else 0,
    )


def hf_fields(document: Mapping[str, Any]) -> dict[str, Any]:
    """No fields: tensors show everything. Rejects unsupported activations."""
    check_act(document)
    return {}


def hf_config(config: SwinConfig) -> dict[str, Any]:
    """The architecture for `config.json`."""
    return {
        "architectures": ["SwinForImageClassification"],
        "model_type": "swin",
        "embed_dim": config.widths[0],
        "depths": list(config.depths),
        "num_heads": list(config.heads),
        "window_size": config.window,
        "patch_size": config.patch,
        "mlp_ratio": 4.0,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "qkv_bias": True,
    }


def _depths(names: Mapping[str, Tensor], prefix: str) -> list[int]:
    stages = count_blocks(names, rf"{prefix}layers\.(\d+)\.blocks\.")
    return [count_blocks(names, rf"{prefix}layers\.{i}\.blocks\.(\d+)\.") for i in range(stages)]


def _img_size(window: int) -> Size:
    """The image size of published models with such windows: 224 for 7, 384 for 12."""
    return (32 * window, 32 * window)
