"""PVT: transformers' `PvtForImageClassification`, and the files of the authors, whose names are ours.

transformers has one epsilon for all norms; the authors, and so we, have 1e-5 in the norms of patches and of keys. What
comes with transformers' `config.json` keeps its own, so that it gives the same answers.
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
from vitrail.weights.formats import IMAGENET, Format, Layout, compare, same, sizes
from vitrail.weights.formats.hf import check_act
from vitrail.weights.key_tables import count_blocks, inverse, join, rename, split_qkv
from vitrail.weights.sidecar import Beside

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
    """What each of our modules is called by transformers, which counts stages from 0."""
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
    return join(rename(tensors, inverse(_table(count_depths(tensors, "encoder.block.{}.")))), "kv")


def _write_hf(state: Mapping[str, Tensor], config: PVTConfig) -> dict[str, Tensor]:
    named = rename(split_qkv(state, "kv"), _table(config.depths))
    return {name if name.startswith("classifier.") else f"pvt.{name}": value for name, value in named.items()}


def _cannot_hf(config: PVTConfig) -> str | None:
    if config.img_size[0] != config.img_size[1]:
        return "images that are no squares"
    # Its classes count positions as if the first patches had 4 pixels, whatever they have.
    return None if config.patch == 4 else f"first patches of {config.patch} pixels"


HABIT = replace(IMAGENET, crop=0.875)  # of the authors, for both versions
LAYOUTS: dict[Format, Layout] = {
    "hf": Layout(r"encoder\.patch_embeddings\.0\.projection\.weight", _read_hf, _write_hf, _cannot_hf, HABIT),
    "original": Layout("pos_embed1", same, habit=HABIT),
}


def architecture(where: str, state: Mapping[str, Tensor], beside: Beside, model: PVTConfig | None) -> PVTConfig:
    """The architecture that tensors have, by their shapes."""
    _, channels, patch, other = sizes(where, "PVT", state, "patch_embed1.proj.weight", 4)
    if patch != other:
        raise UserError(f"{where} has patches of {patch}x{other} pixels; vitrail's are squares.")
    seen = pyramid(where, state, "block{}.", first=1)
    usual = {config.widths: config.heads for config in CONFIGS.values()}
    return PVTConfig(
        **seen,
        heads=count_heads(where, seen["widths"], usual, beside, model),
        patch=patch,
        img_size=_img_size(where, state, patch, beside.img_size, None if model is None else model.img_size),
        channels=channels,
        classes=sizes(where, "PVT", state, "head.weight", 2)[0] if "head.weight" in state else 0,
        eps=key_eps(beside, model),
    )


def hf_settings(document: Mapping[str, Any]) -> dict[str, Any]:
    """What transformers' `config.json` says and tensors do not show."""
    check_act(document)
    return {"heads": document.get("num_attention_heads")}


def hf_document(config: PVTConfig) -> dict[str, Any]:
    """What transformers' `config.json` must say."""
    return {
        "architectures": ["PvtForImageClassification"],
        "model_type": "pvt",
        "num_labels": config.classes,  # 1000 else, whatever the names of the classes are
        "sequence_reduction_ratios": list(config.reductions),
        "patch_sizes": strides(config),
        **hf_pyramid(config),
    }


def _img_size(where: str, state: Mapping[str, Tensor], patch: int, *said: Size | None) -> Size:
    """The image size that the positions of the first stage are for: as somebody says if that fits, else of a square."""
    rows = sizes(where, "PVT", state, "pos_embed1", 3)[1]
    for size in said:
        if size is not None and (size[0] // patch) * (size[1] // patch) == rows:
            return size
    side = math.isqrt(rows)
    if side * side == rows:
        return side * patch, side * patch
    raise UserError(
        f"{where} has {rows} positions in its first stage, which are no square of patches. Give the model with its "
        "image size: `model` may be a configuration, vitrail.models.configure(NAME, img_size=…)."
    )


# What PVT and PVT v2 share. A `stage` is where its blocks are, with a place for its number, which begins with `first`.


def count_depths(names: Mapping[str, Tensor], stage: str, first: int = 0) -> Ints:
    """How many blocks each stage has."""
    stages = count_blocks(names, re.escape(stage).replace(r"\{\}", r"(\d+)"))
    return tuple(count_blocks(names, re.escape(stage.format(first + i)) + r"(\d+)\.") for i in range(stages))


def pyramid(where: str, state: Mapping[str, Tensor], stage: str, first: int = 0) -> dict[str, Any]:
    """What the blocks show of a configuration. Of a stage, the first shows all but how many there are."""
    depths = count_depths(state, stage, first) or (0,)
    blocks = [f"{stage.format(first + i)}0" for i in range(len(depths))]
    mlps = [sizes(where, "PVT", state, f"{block}.mlp.fc1.weight", 2) for block in blocks]
    for hidden, width in mlps:
        if hidden % width:
            raise UserError(f"{where} has an MLP of {hidden} for a width of {width}; a PVT's are multiples of it.")
    filters = [f"{block}.attn.sr.weight" for block in blocks]
    return {
        "widths": tuple(width for _, width in mlps),
        "depths": depths,
        "ratios": tuple(hidden // width for hidden, width in mlps),
        "reductions": tuple(sizes(where, "PVT", state, name, 4)[2] if name in state else 1 for name in filters),
    }


def count_heads(where: str, widths: Ints, usual: Mapping[Ints, Ints], beside: Beside, model: Any) -> Ints:
    """The number of heads of each stage: as a `config.json` says, or `model`, or as usual for the widths."""
    if model is not None:
        compare(where, {"widths": widths}, {"widths": model.widths})
    told: Ints | None = beside.fields.get("heads") or (usual.get(widths) if model is None else model.heads)
    if told is None:
        raise UserError(
            f"{where} is a PVT of widths {widths}, whose numbers of heads its tensors do not show. "
            "Put a config.json beside it, or give `model`."
        )
    return told


def key_eps(beside: Beside, model: PVTConfig | PVTv2Config | None) -> float:
    """The epsilon of the norms of patches and of keys: as a `config.json` says, or `model`, or the authors'."""
    return beside.eps or (PVTConfig.eps if model is None else model.eps)


def strides(config: PVTConfig | PVTv2Config) -> list[int]:
    """By what each stage divides the map before it."""
    return [config.patch, *(2 for _ in config.widths[1:])]


def hf_pyramid(config: PVTConfig | PVTv2Config) -> dict[str, Any]:
    """What transformers' `config.json` calls alike in both."""
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
