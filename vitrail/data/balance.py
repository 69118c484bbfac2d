"""Class imbalance: measuring it, and the two remedies, class weights and balanced sampling.

Both make every class count equally: weights scale the loss of a rare class, balanced sampling repeats its images.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from vitrail.data.dataset import Numbers

UNEVEN_RATIO, SEVERE_RATIO = 3, 20  # largest class over smallest: worth a note, and an error


@dataclass(frozen=True)
class Imbalance:
    """The largest and the smallest class."""

    largest: str
    smallest: str
    counts: tuple[int, int]

    @property
    def ratio(self) -> float:
        return self.counts[0] / self.counts[1]

    def __str__(self) -> str:
        many, few = self.counts
        return f"'{self.largest}' has {self.ratio:.0f} times as many images as '{self.smallest}' ({many:,} and {few:,})"


def imbalance(counts: Mapping[str, int]) -> Imbalance | None:
    """The imbalance of the classes, by their numbers of images, or None below UNEVEN_RATIO. Ignores empty classes."""
    present = {label: count for label, count in counts.items() if count}
    if not present:
        return None
    largest, smallest = max(present, key=present.__getitem__), min(present, key=present.__getitem__)
    found = Imbalance(largest, smallest, (present[largest], present[smallest]))
    return found if found.ratio > UNEVEN_RATIO else None


def balanced_order(targets: Numbers, seed: int, epoch: int) -> Numbers:
    """N draws with equal class frequencies; draw `i + r * N` is the r-th repetition of image `i`.

    Every class gets an equal share of the epoch. Each of its images is shown as often as the share allows; the
    remainder is dealt from shuffled decks that continue from epoch to epoch, so no image repeats before all have been
    shown. The draws of an epoch depend on its number and the seed only.
    """
    labels, sizes = np.unique(targets, return_counts=True)
    members = np.split(np.argsort(targets, kind="stable"), np.cumsum(sizes)[:-1])
    share = -(-len(targets) // len(labels))  # rounded up; the surplus is cut after the shuffle
    drawn = []
    for label, images in zip(labels.tolist(), members, strict=True):
        rounds, rest = divmod(share, len(images))
        deck, begin = divmod(epoch * rest, len(images))
        decks = [
            np.random.Generator(np.random.PCG64([seed, deck + k, label, 1])).permutation(images)
            + (rounds + k) * len(targets)
            for k in (0, 1)
        ]
        drawn.append((images + len(targets) * np.arange(rounds)[:, None]).ravel())
        drawn.append(np.concatenate(decks)[begin : begin + rest])
    order = np.random.Generator(np.random.PCG64([seed, epoch])).permutation(np.concatenate(drawn))
    return order[: len(targets)]
