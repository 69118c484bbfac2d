"""The images of a data set that a model takes for most alike: those whose feature vectors point the same way."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vitrail.charts.style import BLUE, INK, ORANGE
from vitrail.charts.tiles import Caption, Section, Tile, sheet
from vitrail.data import Split
from vitrail.data.pixels import thumbnail
from vitrail.errors import UserError
from vitrail.tasks import Task

_ROWS = 1024  # feature vectors that are compared at a time


def neighbours(
    queries: NDArray[np.floating],
    features: NDArray[np.floating],
    k: int = 7,
    own: Sequence[int] | NDArray[np.integer] | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """For each query, (Q, D), the k most similar rows of `features`, (N, D): their numbers and cosines, both (Q, k).

    The nearest comes first; equals come in their order. `own` are the numbers of the queries themselves among the
    features, if they are: an image is no neighbour of its own.
    """
    most = len(features) - (own is not None)
    if not 1 <= k <= most:
        raise UserError(f"'k' must be from 1 to the {most} images that there are to compare with, but it is {k}.")
    directions, found, cosines = unit(features), [], []
    for at in range(0, len(queries), _ROWS):
        similar = unit(queries[at : at + _ROWS]) @ directions.T
        if own is not None:
            similar[np.arange(len(similar)), np.asarray(own)[at : at + _ROWS]] = -np.inf
        order = np.argsort(-similar, axis=1, kind="stable")[:, :k]
        found.append(order)
        cosines.append(np.take_along_axis(similar, order, axis=1))
    return np.concatenate(found), np.concatenate(cosines)


def unit(features: NDArray[np.floating]) -> NDArray[np.float32]:
    """Vectors of length one; one of nothing but zeros stays as it is."""
    vectors = features.astype(np.float32)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.maximum(lengths, np.finfo(np.float32).tiny)


def neighbours_figure(
    queries: Sequence[Tile],
    split: Split,
    found: NDArray[np.int64],
    cosines: NDArray[np.float32],
    task: Task,
    meant: Sequence[frozenset[str]],
    name: str = "",
) -> Figure:
    """Every query at the left of its row, its neighbours behind it, and in orange those that are of other classes.

    `meant` are the classes or labels of each query, none if they are not known; a neighbour that has none of them is of
    another class. Of numbers, none is.
    """
    rows = []
    telling = task.counted and any(meant)
    for q, query in enumerate(queries):
        words = task.describe(split.targets[found[q]])
        row = [Tile(query.image, query.captions, BLUE)]
        for i, cosine, (label, examples) in zip(found[q].tolist(), cosines[q], words, strict=True):
            wrong = telling and bool(meant[q]) and meant[q].isdisjoint(examples)
            captions = [Caption(label, ORANGE if wrong else INK), Caption(f"similarity {cosine:.2f}", lines=1)]
            row.append(Tile(thumbnail(split.image(i)), captions, ORANGE if wrong else None))
        rows.append(row)
    note = f"by the cosine of their features, among {len(split):,} images{f' of {name}' if name else ''}"
    return sheet(Section("Nearest neighbours", note + ("; orange: of another class" if telling else ""), rows))
