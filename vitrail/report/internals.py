"""The section on the model's internals: attention distance, positions, token mixing, filters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.charts import build
from vitrail.charts.kinds import Chart
from vitrail.data.loader import batches
from vitrail.errors import UserError
from vitrail.explain import attention_distance
from vitrail.explain.attention import even_distance
from vitrail.explain.filters import first_filters
from vitrail.explain.geometry import attends
from vitrail.explain.mixing import in_pairs, mixing_maps
from vitrail.explain.positions import NO_POSITIONS, stage_biases, stage_similarities
from vitrail.models import Model
from vitrail.report.facts import RunFacts
from vitrail.report.images import Album, InlineImage, similarities, tiles
from vitrail.report.sections import reads

_DISTANCE_IMAGES = 128
_BIAS = (
    "Bias of the attention logits by key offset: one row per layer, one tile per head, with the query at its centre."
)
_MIXING = "Input weights of hidden units on the patch grid; opposite units in pairs, from low to high frequency."

Drawn = tuple[str, str, Image.Image]  # title, text, sheet of tiles


@dataclass(frozen=True)
class Sheet:
    """A sheet of tiles with title and description."""

    title: str
    text: str
    picture: InlineImage


@dataclass(frozen=True)
class Inside:
    """Attention distance and sheets of weights, with notes on what is missing."""

    distance: Chart | None = None
    sheets: list[Sheet] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def inside(facts: RunFacts, album: Album, workers: int) -> Inside:
    """Attention distance, positions and filters, as in figure 7 of the ViT paper."""
    model, card = facts.model, facts.card
    if model is None or card is None:
        return Inside()
    distance: Chart | None = None
    notes: list[str] = []
    if facts.data is not None and attends(model):
        split = reads(facts.data.splits["val"], facts)
        images = min(_DISTANCE_IMAGES, len(split))
        read_ahead = batches(split, card.preprocess, 32, workers, range(images))
        normalised = (card.preprocess.normalise(pixels.to(facts.device)) for pixels, _ in read_ahead)
        far = attention_distance(model, normalised)
        distance = build.distance(far, even_distance(model), card.config.img_size[1], images)
    drawn = [*_places(model)]
    if not drawn and attends(model):
        notes.append(NO_POSITIONS)
    try:
        drawn.append(_filters(model))
    except UserError as error:
        notes.append(str(error))
    added = ((title, text, album.add(picture, exact=True)) for title, text, picture in drawn)
    return Inside(distance, [Sheet(title, text, picture) for title, text, picture in added if picture], notes)


def _places(model: Model) -> Iterator[Drawn]:
    """Position similarities, relative position biases and token mixing, one sheet per stage or layer."""
    pyramid = len(model.config.grids) > 1
    for stage, similar in enumerate(stage_similarities(model), start=1):
        yield f"Position similarity{f', stage {stage}' if pyramid else ''}", *_similarity(similar)
    for stage, bias in stage_biases(model).items():
        yield f"Relative position biases{f', stage {stage}' if pyramid else ''}", _BIAS, _biases(bias)
    if model.mixing():
        maps = mixing_maps(model)
        for layer in sorted({0, len(maps) - 1}):
            units = maps[layer][in_pairs(maps[layer]), ..., None]
            yield f"Token mixing, layer {layer + 1}", _MIXING, tiles(units, 8)


def _biases(tables: NDArray[np.float32]) -> Image.Image:
    return similarities(tables / max(np.abs(tables).max(), 1e-12))


def _similarity(similar: NDArray[np.float32]) -> tuple[str, Image.Image]:
    text = (
        "One tile per patch: cosine similarity of its position embedding to all others, from dark (−1) to yellow (1)."
    )
    return f"{text} {_rows_and_columns(similar)}", similarities(similar)


def _filters(model: Model) -> Drawn:
    found = first_filters(model)
    return (
        found.title,
        f"Filters of the first layer: the first {len(found.values)} {found.kind}.",
        tiles(found.values, 7),
    )


def _rows_and_columns(similar: NDArray[np.float32]) -> str:
    """Mean similarity of positions in the same row or column, and of all others."""
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
