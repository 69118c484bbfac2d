"""Figures of weights: position embeddings and biases, token mixing, filters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from matplotlib.figure import Figure

from vitrail.charts.style import GREY, heading, styled
from vitrail.errors import UserError
from vitrail.explain.figures.tiles import SIGNED, SIMILARITY, Array, colour_bar, draw_tiles, number_tiles
from vitrail.explain.filters import first_filters
from vitrail.explain.mixing import in_pairs, mixing_maps
from vitrail.explain.positions import NO_POSITIONS, stage_biases, stage_similarities
from vitrail.explain.subject import Drawing, Subject

_PLACES = 14  # maximum rows and columns of patches with a tile
_LEAST = 5.0  # minimum width in inches, for the title


def positions(subject: Subject) -> Iterator[Drawing]:
    """Similarities of position embeddings, or relative position biases, one figure per stage."""
    model = subject.model
    similarity, tables = stage_similarities(model), stage_biases(model)
    if not similarity and not tables:
        raise UserError(NO_POSITIONS)
    pyramid = len(model.config.grids) > 1
    for stage, similar in enumerate(similarity, start=1):
        name, where = (f"positions-stage{stage}", f", stage {stage}") if pyramid else ("positions", "")
        yield Drawing(name, draw_similarity(similar, where), {"similarity": similar})
    for stage, bias in tables.items():
        name, where = (f"bias-stage{stage}", f", stage {stage}") if pyramid else ("bias", "")
        yield Drawing(name, draw_bias(bias, where), {"bias": bias})


def mixing(subject: Subject) -> Iterator[Drawing]:
    """Token-mixing weights of the first three layers and the last."""
    if not subject.model.mixing():
        return
    maps = mixing_maps(subject.model)
    layers = sorted({*range(min(3, len(maps))), len(maps) - 1})
    units = {number: in_pairs(maps[number]) for number in layers}
    drawn = draw_mixing({number + 1: maps[number][chosen] for number, chosen in units.items()}, maps.shape[1])
    yield Drawing("mixing", drawn, {"mixing": maps})


def filters(subject: Subject) -> Iterator[Drawing]:
    """Filters of the first layer."""
    found = first_filters(subject.model)
    yield Drawing("filters", draw_filters(found.values, found.title, found.kind), {"filters": found.values})


# As figures ----------------------------------------------------------------------------------------------


@styled
def draw_similarity(similarity: Array, where: str = "") -> Figure:
    """One tile per patch: the similarity of its position embedding to those of all patches, (h, w, h, w)."""
    h, w = similarity.shape[:2]
    rows, columns = (np.unique(np.linspace(0, n - 1, min(n, _PLACES)).round().astype(int)) for n in (h, w))
    tile = min(6.4 / max(len(rows), len(columns)), 0.9)
    figure = Figure(
        figsize=(max(tile * len(columns) + 1.6, _LEAST), tile * len(rows) * h / w + 1.2), layout="constrained"
    )
    axes = figure.add_subplot()
    heading(
        axes,
        f"Similarity of position embeddings{where}",
        f"one tile per {'patch' if similarity[np.ix_(rows, columns)].shape[:2] == (h, w) else 'drawn patch'}: its "
        f"similarity to all {h} × {w} patches",
    )
    others = similarity.reshape(h * w, h * w)[~np.eye(h * w, dtype=bool)]
    low, high = (float(others.min()), float(others.max())) if others.size else (0.0, 1.0)
    image = draw_tiles(axes, similarity[np.ix_(rows, columns)], cmap=SIMILARITY, vmin=low, vmax=high)
    number_tiles(axes, len(rows), len(columns), "patch row", "patch column", names=(rows, columns))
    colour_bar(figure, axes, image, "cosine similarity (a patch to itself is 1)")
    return figure


@styled
def draw_bias(tables: Array, where: str = "") -> Figure:
    """Relative position biases by the offset of the key, one tile per layer and head: (L, H, 2h-1, 2w-1)."""
    layers, count, h, w = tables.shape
    tile = min(max(6.4 / count, 0.45), 1.1)
    figure = Figure(figsize=(max(tile * count + 1.7, _LEAST), tile * layers * h / w + 1.2), layout="constrained")
    axes = figure.add_subplot()
    heading(axes, f"Relative position biases{where}", "the query patch is at the centre of each tile")
    most = max(float(np.abs(tables).max()), 1e-12)
    image = draw_tiles(axes, tables, cmap=SIGNED, vmin=-most, vmax=most)
    number_tiles(axes, layers, count, "layer", "head", first=1)
    colour_bar(figure, axes, image, "bias of the attention logit")
    return figure


@styled
def draw_filters(components: Array, title: str = "Patch filters", kind: str = "principal components") -> Figure:
    """Filters or their principal components, (count, p, p, C), each scaled separately.

    One channel is drawn in grey and three in colour; otherwise each filter is a row with one tile per band.
    """
    count, _, _, channels = components.shape
    most = np.maximum(np.abs(components).max(axis=(1, 2, 3), keepdims=True), 1e-12)  # a filter may be all zeros
    scaled = components / most / 2 + 0.5
    plain = channels in (1, 3)
    columns = min(7, count) if plain else channels
    rows = -(-count // columns) if plain else count
    tile = 0.8 if plain else 0.45
    figure = Figure(figsize=(max(tile * columns + 0.6, _LEAST), tile * rows + 1), layout="constrained")
    axes = figure.add_subplot()
    heading(axes, title, f"first {count} {kind}, " + ("each scaled separately" if plain else "one row each"))
    if plain:
        blank = np.ones((rows * columns - count, *scaled.shape[1:]), np.float32)
        tiles = np.concatenate([scaled, blank]).reshape(rows, columns, *scaled.shape[1:])
        draw_tiles(axes, tiles if channels == 3 else tiles[..., 0], cmap="gray", vmin=0, vmax=1)
        axes.set_axis_off()
    else:
        draw_tiles(axes, scaled.transpose(0, 3, 1, 2), cmap="gray", vmin=0, vmax=1)
        number_tiles(axes, rows, columns, "component" if "component" in kind else "filter", "band", first=1)
    axes.set_anchor("NW")
    return figure


@styled
def draw_mixing(layers: Mapping[int, Array], units: int) -> Figure:
    """Hidden units of token-mixing MLPs, (count, h, w), by layer number; eight per row."""
    count, h, w = next(iter(layers.values())).shape
    across, down = 8, -(-count // 8)
    wide, head, foot, apart = 2.3, 0.6, 0.3, 0.2  # inches; `wide` is a layer
    tall = wide * down * h / (across * w)
    width, height = max(len(layers) * (wide + apart) - apart, _LEAST), head + tall + foot
    figure = Figure(figsize=(width, height))
    figure.text(0, 1 - 0.1 / height, "Token mixing", fontsize=11, fontweight="bold", va="center")
    which = f"all {units} hidden units" if count == units else f"the {count} strongest of {units} hidden units"
    note = f"input weights of {which} on the patch grid; opposite units in pairs, from low to high frequency"
    figure.text(0, 1 - 0.35 / height, note, color=GREY, va="center")
    blank = np.full((across * down - count, h, w), np.nan, np.float32)
    for i, (number, maps) in enumerate(layers.items()):
        axes = figure.add_axes((i * (wide + apart) / width, foot / height, wide / width, tall / height))
        scaled = maps / np.maximum(np.abs(maps).max(axis=(1, 2), keepdims=True), 1e-12)
        draw_tiles(axes, np.concatenate([scaled, blank]).reshape(down, across, h, w), cmap=SIGNED, vmin=-1, vmax=1)
        axes.set(xticks=[], yticks=[], xlabel=f"layer {number}")
    return figure
