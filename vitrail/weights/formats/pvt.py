"""PVT formats: transformers' `PvtForImageClassification`, and the authors' files (our names).

transformers has one epsilon for all norms; the authors, and we, use 1e-5 in the norms of patches and keys. Weights with
a transformers `config.json` keep its epsilon, so that their outputs do not change.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from vitrail.config import Ints, Size
from vitrail.errors import UserError
from vitrail.models.pvt import CONFIGS, PVTConfig
from vitrail.models.pvt_v2 import PVTv2Config
from vitrail.weights.formats import IMAGENET, Format, FormatSpec, check_match, identity, tensor_shape
from vitrail.weights.formats.hf import check_act
from vitrail.weights.key_tables import count_blocks, fuse, inverse, rename, split_qkv
from vitrail.weights.sidecar import Sidecar

_BLOCK = {
    "norm1": "layer_norm_1",
    "attn.q": "attention.self.query",
    "attn.k": "attention.self.key",
    "attn.v": "attention.self.value",
    "attn.sr": "attention.self.sequence_reduction",
    "attn.norm": "attention.self.layer_norm",
    "attn.proj": "attention.output.dense",
    "norm2": "layer_norm_2",
    "mlp.fc1": "mlp.dense1",
    "mlp.fc2": "mlp.dense2",
}


def _table(depths: Sequence[int]) -> dict[str, str]:
    """The key table for transformers, which counts stages from 0."""
    table = {"norm": "encoder.layer_norm", "head": "classifier"}
    table["cls_token"] = f"encoder.patch_embeddings.{len(depths) - 1}.cls_token"
    for i, depth in enumerate(depths):
        patches = f"encoder.patch_embeddings.{i}"
        table[f"patch_embed{i + 1}.proj"] = f"{patches}.projection"
        table[f"patch_embed{i + 1}.norm"] = f"{patches}.layer_norm"
        table[f"pos_embed{i + 1}"] = f"{patches}.position_embeddings"
        for j in range(depth):
            table |= {f"block{i + 1}.{j}.{ours}": f"encoder.block.{i}.{j}.{theirs}" for ours, theirs in _BLOCK.items()}
    return table


def _read_hf(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return fuse(rename(tensors, inverse(_table(count_depths(tensors, "encoder.block.{}.")))), "kv")


def _write_hf(state: Mapping[str, Tensor], config: PVTConfig) -> dict[str, Tensor]:
    named = rename(split_qkv(state, "kv"), _table(config.depths))
    return {name if name.startswith("classifier.") else f"pvt.{name}": value for name, value in named.items()}


def _unsupported_hf(config: PVTConfig) -> str | None:
    if config.img_size[0] != config.img_size[1]:
        return "images that are not square"
    # Its number of positions assumes a first patch size of 4.
    return None if config.patch == 4 else f"a first patch size of {config.patch}"


DEFAULTS = replace(IMAGENET, crop=0.875)  # the authors', for PVT and PVT v2
FORMATS: dict[Format, FormatSpec] = {
    "hf": FormatSpec(
        r"encoder\.patch_embeddings\.0\.projection\.weight", _read_hf, _write_hf, _unsupported_hf, DEFAULTS
    ),
    "original": FormatSpec("pos_embed1", identity, defaults=DEFAULTS),
}


def architecture(where: str, state: Mapping[str, Tensor], sidecar: Sidecar, model: PVTConfig | None) -> PVTConfig:
    """The configuration, from tensor shapes."""
    _, channels, patch, other = tensor_shape(where, "PVT", state, "patch_embed1.proj.weight", 4)
    if patch != other:
        raise UserError(f"{where} has patches of {patch}x{other} pixels, but vitrail's are square.")
    seen = pyramid(where, state, "block{}.", first=1)
    usual = {config.widths: config.heads for config in CONFIGS.values()}
    return PVTConfig(
        **seen,
        heads=count_heads(where, seen["widths"], usual, sidecar, model),
        patch=patch,
        img_size=_img_size(where, state, patch, sidecar.img_size, None if model is None else model.img_size),
        channels=channels,
        classes=tensor_shape(where, "PVT", state, "head.weight", 2)[0] if "head.weight" in state else 0,
        eps=key_eps(sidecar, model),
    )


def hf_fields(document: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that only transformers' `config.json` has."""
    check_act(document)
    return {"heads": document.get("num_attention_heads")}


def hf_config(config: PVTConfig) -> dict[str, Any]:
    """The architecture for transformers' `config.json`."""
    return {
        "architectures": ["PvtForImageClassification"],
        "model_type": "pvt",
        "num_labels": config.classes,  # else 1000, whatever id2label says
        "sequence_reduction_ratios": list(config.reductions),
        "patch_sizes": strides(config),
        **hf_pyramid(config),
    }


def _img_size(where: str, state: Mapping[str, Tensor], patch: int, *candidates: Size | None) -> Size:
    """The image size that matches the position embeddings of the first stage: a candidate that fits, else a square."""
    rows = tensor_shape(where, "PVT", state, "pos_embed1", 3)[1]
    for size in candidates:
        if size is not None and (size[0] // patch) * (size[1] // patch) == rows:
            return size
    side = math.isqrt(rows)
    if side * side == rows:
        return side * patch, side * patch
    raise UserError(
        f"{where} has {rows} positions in its first stage, which fit no square image. Give `model` with its image "
        "size: vitrail.models.configure(NAME, img_size=…)."
    )


# Shared by PVT and PVT v2. `stage` is the prefix of a stage's blocks, with a placeholder for its number from `first`.


def count_depths(names: Mapping[str, Tensor], stage: str, first: int = 0) -> Ints:
    """The number of blocks in each stage."""
    stages = count_blocks(names, re.escape(stage).replace(r"\{\}", r"(\d+)"))
    return tuple(count_blocks(names, re.escape(stage.format(first + i)) + r"(\d+)\.") for i in range(stages))


def pyramid(where: str, state: Mapping[str, Tensor], stage: str, first: int = 0) -> dict[str, Any]:
    """The configuration fields shown by the blocks."""
    depths = count_depths(state, stage, first) or (0,)
    blocks = [f"{stage.format(first + i)}0" for i in range(len(depths))]
    mlps = [tensor_shape(where, "PVT", state, f"{block}.mlp.fc1.weight", 2) for block in blocks]
    for hidden, width in mlps:
        if hidden % width:
            raise UserError(f"{where} has an MLP of {hidden} for a width of {width}, but it must be a multiple.")
    filters = [f"{block}.attn.sr.weight" for block in blocks]
    return {
        "widths": tuple(width for _, width in mlps),
        "depths": depths,
        "ratios": tuple(hidden // width for hidden, width in mlps),
        "reductions": tuple(tensor_shape(where, "PVT", state, name, 4)[2] if name in state else 1 for name in filters),
    }


def count_heads(where: str, widths: Ints, usual: Mapping[Ints, Ints], sidecar: Sidecar, model: Any) -> Ints:
    """The number of heads of each stage: from `config.json`, `model`, or a published model of the same widths."""
    if model is not None:
        check_match(where, {"widths": widths}, {"widths": model.widths})
    heads: Ints | None = sidecar.fields.get("heads") or (usual.get(widths) if model is None else model.heads)
    if heads is None:
        raise UserError(
            f"{where} is a PVT of widths {widths}, whose tensors do not show the number of heads. "
            "Add a config.json to its folder, or give `model`."
        )
    return heads


def key_eps(sidecar: Sidecar, model: PVTConfig | PVTv2Config | None) -> float:
    """The epsilon of the norms of patches and keys: from `config.json`, `model`, or the authors'."""
    return sidecar.eps or (PVTConfig.eps if model is None else model.eps)


def strides(config: PVTConfig | PVTv2Config) -> list[int]:
    """The stride of each stage."""
    return [config.patch, *(2 for _ in config.widths[1:])]


def hf_pyramid(config: PVTConfig | PVTv2Config) -> dict[str, Any]:
    """The part of transformers' `config.json` that PVT and PVT v2 share."""
    return {
        "num_encoder_blocks": len(config.widths),
        "depths": list(config.depths),
        "hidden_sizes": list(config.widths),
        "strides": strides(config),
        "num_attention_heads": list(config.heads),
        "mlp_ratios": list(config.ratios),
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
        "qkv_bias": True,
    }
