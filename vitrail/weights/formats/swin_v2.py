"""Swin v2 formats: timm, and Hugging Face's `Swinv2ForImageClassification`.

timm, like us, merges patches at the start of a stage; Hugging Face at the end of the previous one. No tensor shows the
size of the windows: `config.json` or `model` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from vitrail.errors import UserError
from vitrail.models.swin_v2 import SwinV2Config
from vitrail.weights.formats import IMAGENET, Format, FormatSpec, identity, tensor_shape
from vitrail.weights.formats.hf import check_act
from vitrail.weights.key_tables import count_blocks, fuse, inverse, rename, split_qkv
from vitrail.weights.sidecar import Sidecar

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
    "attn.logit_scale": "attention.self.logit_scale",
    "attn.cpb_mlp.0": "attention.self.continuous_position_bias_mlp.0",
    "attn.cpb_mlp.2": "attention.self.continuous_position_bias_mlp.2",
    "attn.q": "attention.self.query",
    "attn.k": "attention.self.key",
    "attn.v": "attention.self.value",
    "attn.q_bias": "attention.self.query.bias",
    "attn.v_bias": "attention.self.value.bias",
    "attn.proj": "attention.output.dense",
    "norm2": "layernorm_after",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}


def _table(depths: Sequence[int]) -> dict[str, str]:
    """The key table for Hugging Face."""
    table = dict(_HF_TOP)
    for i, depth in enumerate(depths):
        where = f"encoder.layers.{i}."
        table |= {f"layers.{i + 1}.downsample.{part}": f"{where}downsample.{part}" for part in _MERGE}
        for j in range(depth):
            table |= {f"layers.{i}.blocks.{j}.{ours}": f"{where}blocks.{j}.{it}" for ours, it in _HF_BLOCK.items()}
    return table


def _read_hf(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return fuse(rename(tensors, inverse(_table(_depths(tensors, r"encoder\.")))))


def _write_hf(state: Mapping[str, Tensor], config: SwinV2Config) -> dict[str, Tensor]:
    named = rename(split_qkv(state), _table(config.depths))
    return {name if name.startswith("classifier.") else f"swinv2.{name}": value for name, value in named.items()}


def _unsupported_timm(config: SwinV2Config) -> str | None:
    """timm's windows in a map that is smaller are as large as the map, ours are squares."""
    for h, w in config.grids:
        if min(h, w) < config.window and h != w:
            return f"a map of {h}x{w} in windows of {config.window}"
    return None


def _unsupported_hf(config: SwinV2Config) -> str | None:
    """Hugging Face pads a map before the shift, not after, and shifts it in both directions or in none."""
    if config.widths != tuple(config.widths[0] * 2**i for i in range(len(config.widths))):
        return f"the widths {config.widths}, which do not double"
    for (h, w), n in zip(config.grids, config.windows, strict=True):
        if h % n or w % n or min(h, w) <= n < max(h, w):
            return f"a map of {h}x{w} in windows of {n}"
    return None


FORMATS: dict[Format, FormatSpec] = {
    "hf": FormatSpec(
        r"encoder\.layers\.0\.blocks\.0\.attention\.self\.continuous_position_bias_mlp\.0\.weight",
        _read_hf,
        _write_hf,
        _unsupported_hf,
        replace(IMAGENET, crop=1.0),
        eps=1e-5,
    ),
    "timm": FormatSpec(
        r"layers\.0\.blocks\.0\.attn\.cpb_mlp\.0\.weight", identity, identity, _unsupported_timm, IMAGENET, eps=1e-5
    ),
}


def architecture(where: str, state: Mapping[str, Tensor], sidecar: Sidecar, model: SwinV2Config | None) -> SwinV2Config:
    """The configuration, from tensor shapes; these do not show the windows and the image size."""
    _, channels, patch, other = tensor_shape(where, "Swin v2", state, "patch_embed.proj.weight", 4)
    if patch != other:
        raise UserError(f"{where} has patches of {patch}x{other} pixels, but vitrail's are square.")
    depths, widths, heads = _depths(state, ""), [], []
    for i in range(len(depths)):
        widths.append(tensor_shape(where, "Swin v2", state, f"layers.{i}.blocks.0.attn.proj.weight", 2)[0])
        heads.append(tensor_shape(where, "Swin v2", state, f"layers.{i}.blocks.0.attn.logit_scale", 3)[0])
    window = model.window if model is not None else sidecar.fields.get("window")
    if window is None:
        raise UserError(
            f"{where} does not show the size of its windows. Give `model`: 'swin_v2_t' has windows of 8, "
            "'swin_v2_t_w16' of 16; `vitrail models swin_v2` lists the others."
        )
    return SwinV2Config(
        widths=tuple(widths),
        depths=tuple(depths),
        heads=tuple(heads),
        window=window,
        pretrained=model.pretrained if model is not None else sidecar.fields.get("pretrained", ()),
        patch=patch,
        img_size=sidecar.img_size or (model.img_size if model is not None else (256, 256)),
        channels=channels,
        classes=tensor_shape(where, "Swin v2", state, "head.fc.weight", 2)[0] if "head.fc.weight" in state else 0,
    )


def hf_fields(document: Mapping[str, Any]) -> dict[str, Any]:
    """The windows. Rejects unsupported activations."""
    check_act(document)
    pretrained = tuple(document.get("pretrained_window_sizes") or ())
    return {"window": document.get("window_size"), "pretrained": pretrained if any(pretrained) else ()}


def hf_config(config: SwinV2Config) -> dict[str, Any]:
    """The architecture for `config.json`."""
    return {
        "architectures": ["Swinv2ForImageClassification"],
        "model_type": "swinv2",
        "embed_dim": config.widths[0],
        "depths": list(config.depths),
        "num_heads": list(config.heads),
        "window_size": config.window,
        "pretrained_window_sizes": list(config.pretrained or [0] * len(config.depths)),
        "patch_size": config.patch,
        "mlp_ratio": 4.0,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "qkv_bias": True,
    }


def _depths(names: Mapping[str, Tensor], prefix: str) -> list[int]:
    stages = count_blocks(names, rf"{prefix}layers\.(\d+)\.blocks\.")
    return [count_blocks(names, rf"{prefix}layers\.{i}\.blocks\.(\d+)\.") for i in range(stages)]
