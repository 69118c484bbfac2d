"""Key tables: from our module and tensor names to those of a foreign format.

In tables of formats that store queries, keys and values separately they are `attn.q`, `attn.k` and `attn.v`; the two
halves of a gated MLP's first layer are `mlp.gate` and `mlp.up`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

Table = Mapping[str, str]  # ours -> theirs


def key_table(depth: int, top: Table, block: Table, where: str) -> dict[str, str]:
    """The table of a whole model: `top`, and `block` for every block under the foreign prefix `where.format(i)`."""
    table = dict(top)
    for i in range(depth):
        table |= {f"blocks.{i}.{ours}": where.format(i) + theirs for ours, theirs in block.items()}
    return table


def new_name(name: str, table: Mapping[str, str]) -> str:
    """The new name of a tensor, by its own name or its module's; unchanged if the table has neither."""
    module, _, kind = name.rpartition(".")
    return table.get(name) or (f"{table[module]}.{kind}" if module in table else name)


def rename(tensors: Mapping[str, Tensor], table: Mapping[str, str]) -> dict[str, Tensor]:
    """Tensors under their new names."""
    return {new_name(name, table): tensors[name] for name in tensors}


def count_blocks(names: Iterable[str], pattern: str) -> int:
    """The number of blocks, by a pattern whose first group matches the block number."""
    return len({match[1] for name in names if (match := re.match(pattern, name))})


def fuse(state: dict[str, Tensor], letters: str = "qkv") -> dict[str, Tensor]:
    """Fuses separate projections into one matrix, as in our models. Empties `state`, so that each part is freed.

    `letters` are the projections to fuse: "qkv", or "kv" where queries stay separate.
    """
    fused = {}
    for name in list(state):
        whole, parts = _whole(name, letters)
        if parts and all(part in state for part in parts):
            fused[whole] = torch.cat([state.pop(part) for part in parts])
        elif name in state:  # else already fused
            fused[name] = state.pop(name)
    return fused


def split_qkv(state: Mapping[str, Tensor], letters: str = "qkv") -> dict[str, Tensor]:
    """Splits fused queries, keys and values: the inverse of `fuse`."""
    split: dict[str, Tensor] = {}
    for name, value in state.items():
        match = re.fullmatch(rf"(.*\.attn)\.{letters}\.(weight|bias)", name)
        if match:
            parts = zip(letters, value.chunk(len(letters)), strict=True)
            split |= {f"{match[1]}.{x}.{match[2]}": part.contiguous() for x, part in parts}
        else:
            split[name] = value
    return split


def _whole(name: str, letters: str) -> tuple[str, list[str]]:
    """The fused tensor that a part belongs to, and all its parts in order; no parts for any other tensor."""
    wholes = {f"attn.{letters}": [f"attn.{x}" for x in letters], "mlp.fc1": ["mlp.gate", "mlp.up"]}
    for whole, parts in wholes.items():
        for part in parts:
            block, found, kind = name.partition(f".{part}.")
            if found:
                return f"{block}.{whole}.{kind}", [f"{block}.{other}.{kind}" for other in parts]
    return name, []


def inverse(table: Table) -> dict[str, str]:
    return {theirs: ours for ours, theirs in table.items()}
