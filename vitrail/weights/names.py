"""What the key tables of foreign formats share. A table says what each module or tensor of ours is called elsewhere.

Formats that keep queries, keys and values apart call them `attn.q`, `attn.k` and `attn.v` in their tables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

Table = Mapping[str, str]  # ours -> theirs


def stems(depth: int, top: Table, block: Table, where: str) -> dict[str, str]:
    """The whole table of a model: `block` serves every block, which they find at `where` with its number in."""
    found = dict(top)
    for i in range(depth):
        found |= {f"blocks.{i}.{ours}": where.format(i) + theirs for ours, theirs in block.items()}
    return found


def new_name(name: str, table: Mapping[str, str]) -> str:
    """A tensor's other name, found by its whole name or by that of its module; without one it keeps its own."""
    module, _, kind = name.rpartition(".")
    return table.get(name) or (f"{table[module]}.{kind}" if module in table else name)


def rename(tensors: Mapping[str, Tensor], table: Mapping[str, str]) -> dict[str, Tensor]:
    """Tensors under their other names."""
    return {new_name(name, table): tensors[name] for name in tensors}


def count_blocks(names: Mapping[str, Tensor], pattern: str) -> int:
    """How many blocks there are, by a pattern with a group that matches their numbers."""
    return len({match[1] for name in names if (match := re.match(pattern, name))})


def join_qkv(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Queries, keys and values as the one matrix that they are here. Empties `state`, so that each part is freed."""
    joined = {}
    for name in list(state):
        if name not in state:  # joined already
            continue
        match = re.fullmatch(r"(.*\.attn)\.[qkv]\.(weight|bias)", name)
        parts = [f"{match[1]}.{x}.{match[2]}" for x in "qkv"] if match else []
        if match and all(part in state for part in parts):
            joined[f"{match[1]}.qkv.{match[2]}"] = torch.cat([state.pop(part) for part in parts])
        else:
            joined[name] = state.pop(name)
    return joined


def split_qkv(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `join_qkv`."""
    split: dict[str, Tensor] = {}
    for name, value in state.items():
        match = re.fullmatch(r"(.*\.attn)\.qkv\.(weight|bias)", name)
        if match:
            parts = zip("qkv", value.chunk(3), strict=True)
            split |= {f"{match[1]}.{x}.{match[2]}": part.contiguous() for x, part in parts}
        else:
            split[name] = value
    return split


def inverse(table: Table) -> dict[str, str]:
    return {theirs: ours for ours, theirs in table.items()}
