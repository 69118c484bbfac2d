"""ViT format of the paper's authors: `.npz` files such as ViT-B_16.npz, AugReg's and big_vision's.

Kernels are stored input first, those of attention with a dimension for the heads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from vitrail.models.vit import ViTConfig
from vitrail.weights.key_tables import Table, count_blocks, fuse, inverse, key_table, new_name, split_qkv

MARKER = "embedding/kernel"

_TOP = {
    "cls_token": "cls",
    "pos_embed": "Transformer/posembed_input/pos_embedding",
    "patch_embed.proj": "embedding",
    "norm": "Transformer/encoder_norm",
    "pre_logits": "pre_logits",
    "head": "head",
}
_WHERE = "Transformer/encoderblock_{}/"


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


def read(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors under our names, in our layout."""
    depth = count_blocks(tensors, r"Transformer/encoderblock_(\d+)/")
    big_vision = any("/MlpBlock_0/" in name for name in tensors)
    table = inverse(key_table(depth, _TOP, _BIG_VISION if big_vision else _BLOCK, _WHERE))
    table["pos_embedding"] = "pos_embed"
    state = {}
    for name in tensors:
        new = new_name(re.sub("/(kernel|scale|bias)$", _kind, name), table)
        state[new] = _to_ours(new, tensors[name])
    return fuse(state)


def write(state: Mapping[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """Our tensors under their names, in their layout."""
    table = key_table(config.depth, _TOP, _BLOCK, _WHERE)
    named = {}
    for name, value in split_qkv(state).items():
        kind = "scale" if value.ndim == 1 else "kernel"
        theirs = new_name(name, table).replace(".weight", f"/{kind}").replace(".bias", "/bias")
        named[theirs] = _to_theirs(name, value, config.heads).contiguous()
    return named


def unsupported(config: ViTConfig) -> str | None:
    """The feature of a model that the format cannot represent."""
    parts = {
        "registers": config.registers,
        "LayerScale": config.layer_scale,
        "gated MLPs": config.act != "gelu",
        f"pooling '{config.pool}'": config.pool not in ("cls", "gap"),
    }
    return next((what for what, there in parts.items() if there), None)


def heads(tensors: Mapping[str, Tensor]) -> int | None:
    """The number of heads, which only tensors of this format show."""
    shapes = [value.shape for name, value in tensors.items() if name.endswith("/query/kernel")]
    return shapes[0][1] if shapes and len(shapes[0]) == 3 else None


def _kind(match: re.Match[str]) -> str:
    return ".bias" if match[1] == "bias" else ".weight"


def _to_ours(name: str, value: Tensor) -> Tensor:
    if name == "patch_embed.proj.weight":
        return value.permute(3, 2, 0, 1)
    if re.search(r"attn\.[qkv]\.weight$", name):
        return value.flatten(1).T
    if re.search(r"attn\.[qkv]\.bias$", name):
        return value.flatten()
    if name.endswith("attn.proj.weight"):
        return value.flatten(0, 1).T
    return value.T if name.endswith("weight") and value.ndim == 2 else value


def _to_theirs(name: str, value: Tensor, heads: int) -> Tensor:
    if name == "patch_embed.proj.weight":
        return value.permute(2, 3, 1, 0)
    if re.search(r"attn\.[qkv]\.weight$", name):
        return value.T.reshape(value.shape[1], heads, -1)
    if re.search(r"attn\.[qkv]\.bias$", name):
        return value.reshape(heads, -1)
    if name.endswith("attn.proj.weight"):
        return value.T.reshape(heads, -1, value.shape[0])
    return value.T if name.endswith("weight") and value.ndim == 2 else value
