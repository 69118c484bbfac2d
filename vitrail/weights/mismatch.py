"""The differences of two state dicts, for messages."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def mismatch(given: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, str]:
    """The differences of two state dicts in names and shapes: one line per tensor."""
    missing = {name: f"missing     {name} {tuple(wanted[name].shape)}" for name in wanted if name not in given}
    unexpected = {name: f"unexpected  {name} {tuple(given[name].shape)}" for name in given if name not in wanted}
    reshaped = {
        name: f"reshaped    {name} {tuple(given[name].shape)}, not {tuple(wanted[name].shape)}"
        for name in wanted
        if name in given and given[name].shape != wanted[name].shape
    }
    return missing | unexpected | reshaped


def table(lines: Mapping[str, str], most: int = 12) -> str:
    """Lines below each other, at most some."""
    more = [f"and {len(lines) - most} more"] if len(lines) > most else []
    return "".join(f"\n  {line}" for line in [*lines.values()][:most] + more)
