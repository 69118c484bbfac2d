"""ViT format of the paper's authors: `.npz` files such as ViT-B_16.npz, AugReg's and big_vision's.

Kernels are stored input first, those of attention with a dimension for the heads. big_vision numbers its modules
otherwise, may stack all blocks in one array each (`scan=True`, for lax.scan), pools by attention (`MAPHead_0`), and has
no tensor for fixed positions. flax computes GELU by tanh.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vitrail.models.layers import Activation
from vitrail.models.vit import ViTConfig
from vitrail.weights.key_tables import Table, count_blocks, fuse, inverse, key_table, new_name, split_qkv

MARKER = "embedding/kernel"
SCANNED_MARKER = "Transformer/encoderblock/LayerNorm_0/scale"  # of big_vision's stacked blocks
ACT: Activation = "gelu_tanh"

_TOP = {
    "cls_token": "cls",
    "pos_embed": "Transformer/posembed_input/pos_embedding",
    "patch_embed.proj": "embedding",
    "norm": "Transformer/encoder_norm",
    "pre_logits": "pre_logits",
    "head": "head",
}
_POSITIONS = ("pos_embedding", "Transformer/pos_embedding")  # big_vision's since 2022, and before
_WHERE, _SCANNED = "Transformer/encoderblock_{}/", "Transformer/encoderblock/"


def _block(norm1: str, attention: str, norm2: str, mlp: str) -> Table:
    return {
        "norm1": norm1,
        "attn.q": f"{attention}/query",
        "attn.k": f"{attention}/key",
        "attn.v": f"{attention}/value",
        "attn.proj": f"{attention}/out",
        "norm2": norm2,
        "mlp.fc1": f"{mlp}/Dense_0",
        "mlp.fc2": f"{mlp}/Dense_1",
    }


_BLOCK = _block("LayerNorm_0", "MultiHeadDotProductAttention_1", "LayerNorm_2", "MlpBlock_3")
_BIG_VISION = _block("LayerNorm_0", "MultiHeadDotProductAttention_0", "LayerNorm_1", "MlpBlock_0")


_POOL = {
    "attn_pool.latent": "probe",
    "attn_pool.q": "MultiHeadDotProductAttention_0/query",
    "attn_pool.k": "MultiHeadDotProductAttention_0/key",
    "attn_pool.v": "MultiHeadDotProductAttention_0/value",
    "attn_pool.proj": "MultiHeadDotProductAttention_0/out",
    "attn_pool.norm": "LayerNorm_0",
    "attn_pool.mlp.fc1": "MlpBlock_0/Dense_0",
    "attn_pool.mlp.fc2": "MlpBlock_0/Dense_1",
}
_MAP_HEAD = {ours: f"MAPHead_0/{theirs}" for ours, theirs in _POOL.items()}


def read(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors under our names, in our layout."""
    blocks = _unstacked(tensors)
    depth = count_blocks(blocks, r"Transformer/encoderblock_(\d+)/")
    big_vision = any("encoderblock_0/MlpBlock_0/" in name for name in blocks)
    table = inverse(key_table(depth, _TOP, _BIG_VISION if big_vision else _BLOCK, _WHERE))
    table |= inverse(_POOL) | inverse(_MAP_HEAD) | dict.fromkeys(_POSITIONS, "pos_embed")  # ViT-G's pool has no prefix
    state = {}
    for name, value in blocks.items():
        new = new_name(re.sub("/(kernel|scale|bias)$", _kind, name), table)
        state[new] = _to_ours(new, value())
    for kind in ("weight", "bias") if "attn_pool.k.weight" in state else ():
        state[f"attn_pool.kv.{kind}"] = torch.cat([state.pop(f"attn_pool.{part}.{kind}") for part in "kv"])
    return fuse(state)


def write(state: Mapping[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """Our tensors under the names of ViT-B_16.npz, or of big_vision if only that has their parts."""
    newer = config.pool == "map" or config.pos == "sincos2d"
    return _write(state, config, _BIG_VISION if newer else _BLOCK)


def write_big_vision(state: Mapping[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """Our tensors under big_vision's names, with stacked blocks. It loads them into models with and without `scan`.

    The position embedding of the class token is added to it, as big_vision has none.
    """
    state = dict(state)
    if config.pos == "learned" and config.placed:
        pos = state["pos_embed"]
        state |= {"cls_token": state["cls_token"] + pos[:, :1], "pos_embed": pos[:, 1:]}
    named, stacks = {}, dict[str, list[Tensor]]()
    for name, value in _write(state, config, _BIG_VISION).items():
        if block := re.match(r"Transformer/encoderblock_\d+/", name):  # in order of their numbers
            stacks.setdefault(_SCANNED + name[block.end() :], []).append(value)
        else:
            named[name] = value
    return named | {name: torch.stack(values) for name, values in stacks.items()}


def _write(state: Mapping[str, Tensor], config: ViTConfig, block: Table) -> dict[str, Tensor]:
    positions = {"pos_embed": _POSITIONS[0]} if block is _BIG_VISION else {}
    table = key_table(config.depth, _TOP | _MAP_HEAD | positions, block, _WHERE)
    named = {}
    for name, value in _split(state).items():
        kind = "scale" if value.ndim == 1 else "kernel"
        theirs = new_name(name, table).replace(".weight", f"/{kind}").replace(".bias", "/bias")
        named[theirs] = _to_theirs(name, value, config.heads).contiguous()
    return named


def _split(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Queries, keys and values apart, those of the pool too."""
    split: dict[str, Tensor] = {}
    for name, value in split_qkv(state).items():
        if name.startswith("attn_pool.kv."):
            parts = zip("kv", value.chunk(2), strict=True)
            split |= {name.replace(".kv.", f".{letter}."): part for letter, part in parts}
        else:
            split[name] = value
    return split


def _unstacked(tensors: Mapping[str, Tensor]) -> dict[str, Callable[[], Tensor]]:
    """Functions that read each tensor, with those of stacked blocks by block."""
    found: dict[str, Callable[[], Tensor]] = {}
    for name in tensors:
        if name.startswith(_SCANNED):
            rest, whole = name.removeprefix(_SCANNED), tensors[name]
            found |= {_WHERE.format(i) + rest: partial(whole.select, 0, i) for i in range(len(whole))}
        else:
            found[name] = partial(tensors.__getitem__, name)
    return found


def unsupported(config: ViTConfig) -> str | None:
    """The feature of a model that the format cannot represent."""
    parts = {
        "registers": config.registers,
        "LayerScale": config.layer_scale,
        "gated MLPs": config.act == "swiglu",
        "QuickGELU": config.act == "quick_gelu",
        f"pooling '{config.pool}'": config.pool not in ("cls", "gap", "map"),
    }
    return next((what for what, there in parts.items() if there), None)


def shown(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """What only tensors of this format show: the number of heads, and fixed positions by the lack of a tensor."""
    shapes = [value.shape for name, value in tensors.items() if name.endswith("/query/kernel")]
    heads = shapes[0][-2] if shapes and len(shapes[0]) in (3, 4) else None
    learned = any(name.endswith("pos_embedding") for name in tensors)
    return {"heads": heads} | ({} if learned else {"pos": "sincos2d"})


def _kind(match: re.Match[str]) -> str:
    return ".bias" if match[1] == "bias" else ".weight"


def _to_ours(name: str, value: Tensor) -> Tensor:
    if name == "patch_embed.proj.weight":
        return value.permute(3, 2, 0, 1)
    if re.search(r"attn(_pool)?\.[qkv]\.weight$", name):
        return value.flatten(1).T
    if re.search(r"attn(_pool)?\.[qkv]\.bias$", name):
        return value.flatten()
    if re.search(r"attn(_pool)?\.proj\.weight$", name):
        return value.flatten(0, 1).T
    return value.T if name.endswith("weight") and value.ndim == 2 else value


def _to_theirs(name: str, value: Tensor, heads: int) -> Tensor:
    if name == "patch_embed.proj.weight":
        return value.permute(2, 3, 1, 0)
    if re.search(r"attn(_pool)?\.[qkv]\.weight$", name):
        return value.T.reshape(value.shape[1], heads, -1)
    if re.search(r"attn(_pool)?\.[qkv]\.bias$", name):
        return value.reshape(heads, -1)
    if re.search(r"attn(_pool)?\.proj\.weight$", name):
        return value.T.reshape(heads, -1, value.shape[0])
    return value.T if name.endswith("weight") and value.ndim == 2 else value
