"""Classes of which there are many images and few: how uneven they are, and what makes up for it.

Both ways have one aim, that every class counts alike: weights make the loss of a rare class larger, balanced
sampling shows its images more often.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from vitrail.data.dataset import Numbers

UNEVEN, LOPSIDED = 3, 20  # largest class over smallest: worth a word, and harmful


@dataclass(frozen=True)
class Imbalance:
    """The class with the most images and the one with the fewest."""

    most: str
    least: str
    counts: tuple[int, int]

    @property
    def ratio(self) -> float:
        return self.counts[0] / self.counts[1]

    def __str__(self) -> str:
        many, few = self.counts
        return f"'{self.most}' has {self.ratio:.0f} times the images of '{self.least}' ({many:,} and {few:,})"


def imbalance(counts: Mapping[str, int]) -> Imbalance | None:
    """How uneven classes are, from their numbers of images, if it is worth a word. A class without any is left out."""
    there = {label: count for label, count in counts.items() if count}
    if not there:
        return None
    most, least = max(there, key=there.__getitem__), min(there, key=there.__getitem__)
    found = Imbalance(most, least, (there[most], there[least]))
    return found if found.ratio > UNEVEN else None


def balanced_order(targets: Numbers, seed: int, epoch: int) -> Numbers:
    """As many draws as there are images, every class equally often; draw `i + r * N` is image `i` for the r-th time.

    An epoch shows every image of a class as often as its share allows, and deals the rest of the share from shuffled
    decks of the class that go on from epoch to epoch: none of its images comes back before all have been seen. What
    an epoch is dealt follows from its number alone.
    """
    labels, sizes = np.unique(targets, return_counts=True)
    members = np.split(np.argsort(targets, kind="stable"), np.cumsum(sizes)[:-1])
    share = -(-len(targets) // len(labels))  # rounded up: what is too much is left out of the shuffled whole
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
