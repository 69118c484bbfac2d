"""`vitrail models`: lists the models."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from json import dumps
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vitrail.models import Row


def models(pattern: str = "") -> Iterator[Row]:
    """List the models with their parameters, multiply-accumulates, tokens and native size.

    Args:
        pattern: only models whose name contains this
    """
    from vitrail.models import rows

    return rows(pattern)


def show(rows: Iterator[Row], *, json: bool = False) -> int:
    """Print each model as soon as it is counted.

    Args:
        json: print JSON
    """
    if json:
        print(dumps([dataclasses.asdict(row) for row in rows], indent=2))
        return 0
    print(f"{'model':<16}{'parameters':>15}{'GMACs':>9}{'tokens':>8}   size")
    for row in rows:
        h, w = row.img_size
        print(f"{row.name:<16}{row.params:>15,}{row.macs / 1e9:>9.2f}{row.tokens:>8}   {h}x{w}", flush=True)
    return 0
