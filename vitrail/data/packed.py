"""Encoded images packed many to a file, with random access: what tar shards and Arrow files share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from vitrail.data.dataset import Array, Found, PackedSplit, Store, Targets
from vitrail.data.folder import channels_and_bits, leave_out
from vitrail.data.images import ImageFacts
from vitrail.data.rows import GlobalRows
from vitrail.errors import UserError
from vitrail.tasks import Task


@dataclass(frozen=True)
class PackedPart:
    """A split as stored: for every row its target, and the facts of its image or the reason it is unusable."""

    store: Store
    targets: Targets
    facts: list[ImageFacts | str]


def from_stores(
    name: str,
    task: Task,
    parts: Mapping[str, PackedPart],
    source: object,
    kind: type[PackedSplit] = PackedSplit,
) -> Found:
    """Drops unusable rows; raises a UserError if they are many."""
    good: dict[str, ImageFacts] = {}
    unreadable: list[tuple[str, str]] = []
    stores = GlobalRows([(part.store, len(part.facts)) for part in parts.values()])
    usable: dict[str, tuple[Array, Targets]] = {}
    for (split, part), rows in zip(parts.items(), stores.rows(), strict=True):
        kept = np.array([isinstance(fact, ImageFacts) for fact in part.facts], dtype=bool)
        good |= {part.store.name(i): fact for i, fact in enumerate(part.facts) if isinstance(fact, ImageFacts)}
        unreadable += [(part.store.name(i), str(part.facts[i])) for i in np.flatnonzero(~kept).tolist()]
        usable[split] = rows[kept], part.targets[kept]
    if not good and not unreadable:
        raise UserError(f"{source} has no images.")
    leave_out(unreadable, len(good) + len(unreadable))
    channels, bits = channels_and_bits(good)
    return Found(
        name=name,
        task=task,
        parts=usable,
        make=lambda _, rows, targets: kind(*stores.locate(rows), targets, channels, bits),
        size=(int(np.median([fact.h for fact in good.values()])), int(np.median([fact.w for fact in good.values()]))),
        channels=channels,
        bits=bits,
        unreadable=tuple(unreadable),
    )
