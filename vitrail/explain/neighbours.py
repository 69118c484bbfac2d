"""Nearest neighbours by the cosine similarity of features."""

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

_ROWS = 1024  # queries per matrix product


def neighbours(
    queries: NDArray[np.floating],
    features: NDArray[np.floating],
    k: int = 7,
    own: Sequence[int] | NDArray[np.integer] | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The k nearest neighbours of each query, (Q, D), in `features`, (N, D): indices and cosines, (Q, k) each.

    Nearest first; ties keep their order. `own` are the indices of the queries in `features`, which are excluded.
    """
    most = len(features) - (own is not None)
    if not 1 <= k <= most:
        raise UserError(f"'k' must be from 1 to {most}, the number of images to compare with, but it is {k}.")
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
    """Vectors scaled to unit norm; zero vectors stay zero."""
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
    """One row per query: the query, then its neighbours, with those of another class in orange.

    `meant` are the classes or labels of each query, empty if unknown; a neighbour with none of them is of another
    class. For a regression, no neighbour is marked.
    """
    rows = []
    marked = task.counted and any(meant)
    digits = 2 if cosines.min() < 0.99 else 4  # features may have a large mean in common
    for q, query in enumerate(queries):
        words = task.describe(split.targets[found[q]])
        row = [Tile(query.image, query.captions, BLUE)]
        for i, cosine, (label, examples) in zip(found[q].tolist(), cosines[q], words, strict=True):
            wrong = marked and bool(meant[q]) and meant[q].isdisjoint(examples)
            named = [Caption(label, ORANGE if wrong else INK)] if label else []
            captions = [*named, Caption(f"similarity {cosine:.{digits}f}", lines=1)]
            row.append(Tile(thumbnail(split.image(i)), captions, ORANGE if wrong else None))
        rows.append(row)
    note = f"by cosine similarity of features, among {len(split):,} images{f' of {name}' if name else ''}"
    return sheet(Section("Nearest neighbours", note + ("; orange: another class" if marked else ""), rows))
