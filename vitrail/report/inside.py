"""The section of a run's page that shows what is inside the model: how far heads look, positions, the first filters."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from vitrail.data.loader import batches
from vitrail.errors import UserError
from vitrail.explain import attention_distance, position_similarity, relative_bias
from vitrail.explain.filters import Filters, first_filters
from vitrail.explain.layout import attends
from vitrail.models.hybrid import Hybrid
from vitrail.models.vit import ViT
from vitrail.report import charts
from vitrail.report.charts import Chart
from vitrail.report.facts import Facts
from vitrail.report.pictures import Album, Picture, similarities, tiles
from vitrail.report.sections import reads

_DISTANCE_IMAGES = 128


@dataclass(frozen=True)
class Inside:
    """What the weights show; where a model has no such thing, a sentence in its place."""

    distance: Chart | None = None
    similarity: Picture | None = None
    bias: Picture | None = None  # of relative positions, a row for each layer
    filters: Picture | None = None
    which: Filters | None = None  # what the picture of filters shows
    notes: list[str] = field(default_factory=list)
    spread: str = ""


def inside(facts: Facts, album: Album, workers: int) -> Inside:
    """How far heads look, what positions are like, and the first filters, as in figure 7 of the paper."""
    model, card = facts.model, facts.card
    if model is None or card is None:
        return Inside()
    which = first_filters(model)
    found = Inside(filters=album.add(tiles(which.values, 7), exact=True), which=which)
    if facts.data is not None and attends(model):
        split = reads(facts.data.splits["val"], facts)
        images = min(_DISTANCE_IMAGES, len(split))
        read_ahead = batches(split, card.preprocess, 32, workers, range(images))
        normalised = (card.preprocess.normalise(pixels.to(facts.device)) for pixels, _ in read_ahead)
        values = attention_distance(model, normalised)
        found = replace(found, distance=charts.distance(values, card.config.img_size, images))
    if not isinstance(model, ViT | Hybrid):
        return found
    try:
        similar = position_similarity(model)
        found = replace(
            found, similarity=album.add(similarities(similar), exact=True), spread=_rows_and_columns(similar)
        )
    except UserError as error:
        if isinstance(model, ViT) and model.config.pos == "relative":
            bias = relative_bias(model)
            found = replace(found, bias=album.add(similarities(bias / max(np.abs(bias).max(), 1e-12)), exact=True))
        else:
            found.notes.append(str(error))
    return found


def _rows_and_columns(similar: NDArray[np.float32]) -> str:
    """How much more alike positions are that share a row or a column than those that share neither."""
    h, w = similar.shape[:2]
    y, x = np.indices((h, w)).reshape(2, -1)
    flat = similar.reshape(h * w, h * w)
    row, column = y[:, None] == y, x[:, None] == x
    other = ~row & ~column
    if not other.any() or not (row ^ column).any():
        return ""
    text = (
        f"Positions in the same row or column have a mean cosine similarity of {flat[row ^ column].mean():.2f}, "
        f"others of {flat[other].mean():.2f}."
    )
    return text.replace("-", "−")
