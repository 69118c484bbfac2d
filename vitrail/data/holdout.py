"""Which images are held out: a stratified share, or a fold."""

from __future__ import annotations

import numpy as np

from vitrail.data.dataset import Numbers, Targets
from vitrail.tasks import Task


def stratify(targets: Numbers, fraction: float, seed: int) -> tuple[Numbers, Numbers]:
    """A stratified split: sorted indices of the images to keep and to hold out (`fraction` of each class).

    A class of two or more images is on both sides; a single image is kept.
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    order = np.argsort(targets, kind="stable")
    _, starts = np.unique(targets[order], return_index=True)
    held = np.zeros(len(targets), dtype=bool)
    for members in np.split(order, starts[1:]):
        count = min(max(round(len(members) * fraction), 1), len(members) - 1)
        held[rng.permutation(members)[:count]] = True
    return np.flatnonzero(~held), np.flatnonzero(held)


def hold_out(task: Task, targets: Targets, fraction: float, seed: int) -> tuple[Numbers, Numbers]:
    """A stratified hold-out for any task."""
    keep, held = stratify(task.strata(targets, fraction), fraction, seed)
    return task.settle(targets, keep, held)


def cut_folds(task: Task, targets: Targets, folds: int, seed: int) -> Numbers:
    """The fold of each image, numbered from 1.

    Fold sizes differ by at most one image, in total and per class.
    """
    stratum = task.strata(targets, 1 / folds)
    shuffled = np.random.Generator(np.random.PCG64(seed)).permutation(len(targets))
    by_class = shuffled[np.argsort(stratum[shuffled], kind="stable")]
    numbers = np.empty(len(targets), dtype=np.int64)
    numbers[by_class] = np.arange(len(targets)) % folds + 1
    return numbers
