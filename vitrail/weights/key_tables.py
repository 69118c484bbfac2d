"""What the key tables of foreign formats share. A table says what each module or tensor of ours is called elsewhere.

Formats that keep queries, keys and values apart call them `attn.q`, `attn.k` and `attn.v` in their tables, and those
that keep the two halves of a gated MLP's first layer apart `mlp.gate` and `mlp.up`.
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


def join(state: dict[str, Tensor], letters: str = "qkv") -> dict[str, Tensor]:
    """What is kept apart as the one matrix that it is here. Empties `state`, so that each part is freed.

    `letters` says which of queries, keys and values are one matrix.
    """
    joined = {}
    for name in list(state):
        whole, parts = _whole(name, letters)
        if parts and all(part in state for part in parts):
            joined[whole] = torch.cat([state.pop(part) for part in parts])
        elif name in state:  # else it was joined already
            joined[name] = state.pop(name)
    return joined


def split_qkv(state: Mapping[str, Tensor], letters: str = "qkv") -> dict[str, Tensor]:
    """Queries, keys and values apart: the inverse of `join` for formats that keep them so."""
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
    """The tensor that one of a table's parts belongs to, and all its parts in order; none of any other tensor."""
    wholes = {f"attn.{letters}": [f"attn.{x}" for x in letters], "mlp.fc1": ["mlp.gate", "mlp.up"]}
    for whole, parts in wholes.items():
        for part in parts:
            block, found, kind = name.partition(f".{part}.")
            if found:
                return f"{block}.{whole}.{kind}", [f"{block}.{other}.{kind}" for other in parts]
    return name, []


def inverse(table: Table) -> dict[str, str]:
    return {theirs: ours for ours, theirs in table.items()}
