"""Encoded images that lie many to a file, each read by its number when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from vitrail.data.dataset import Array, Found, Numbers, Parts
from vitrail.data.folder import leave_out
from vitrail.data.images import ImageFacts, Pixels, read_image
from vitrail.errors import UserError


class Store(Protocol):
    """The images of one split as their files would hold them."""

    def read(self, row: int) -> bytes:
        """The content of an image's file; an UnreadableImage if it cannot be had."""

    def name(self, row: int) -> str: ...


@dataclass(frozen=True)
class Stored:
    """A split as it lies there: for every row a class number, and the facts of its image or what is wrong with it."""

    store: Store
    targets: Numbers
    facts: list[ImageFacts | str]


@dataclass(frozen=True, eq=False)
class StoredSplit:
    """Rows of a store, read when asked for."""

    store: Store
    rows: Numbers
    targets: Numbers
    channels: int

    def __len__(self) -> int:
        return len(self.rows)

    def image(self, i: int) -> Pixels:
        return read_image(self.content(i), self.channels)

    def content(self, i: int) -> bytes:
        """What the file of image `i` would hold."""
        return self.store.read(int(self.rows[i]))

    def name(self, i: int) -> str:
        return self.store.name(int(self.rows[i]))


def from_stores(name: str, classes: tuple[str, ...], parts: Mapping[str, Stored], source: object) -> Found:
    """Leaves out the few rows that cannot be used; a UserError if they are many."""
    good: list[ImageFacts] = []
    unreadable: list[tuple[str, str]] = []
    stores = Parts([(part.store, len(part.facts)) for part in parts.values()])
    usable: dict[str, tuple[Array, Numbers]] = {}
    for (split, part), rows in zip(parts.items(), stores.rows(), strict=True):
        kept = np.array([isinstance(fact, ImageFacts) for fact in part.facts], dtype=bool)
        good += [fact for fact in part.facts if isinstance(fact, ImageFacts)]
        unreadable += [(part.store.name(i), str(part.facts[i])) for i in np.flatnonzero(~kept).tolist()]
        usable[split] = rows[kept], part.targets[kept]
    if not good and not unreadable:
        raise UserError(f"{source} has no images.")
    leave_out(unreadable, len(good) + len(unreadable))
    channels = 1 if all(fact.grey for fact in good) else 3
    return Found(
        name=name,
        classes=classes,
        parts=usable,
        make=lambda _, rows, targets: StoredSplit(*stores.find(rows), targets, channels),
        size=(int(np.median([fact.h for fact in good])), int(np.median([fact.w for fact in good]))),
        channels=channels,
        unreadable=tuple(unreadable),
    )
