"""The figures of `explain` that only relatives of the ViT have: places by stages, and how a Mixer mixes tokens."""

from __future__ import annotations

from collections.abc import Iterator

from vitrail.errors import UserError
from vitrail.explain import figures
from vitrail.explain.mixing import in_pairs, mixing_maps
from vitrail.explain.positions import stage_biases, stage_similarities
from vitrail.explain.subject import Drawing, Subject
from vitrail.models.coatnet import CoAtNet
from vitrail.models.mixer import Mixer
from vitrail.models.pvt import PVT
from vitrail.models.swin import Swin


def positions(subject: Subject) -> Iterator[Drawing]:
    """What every stage knows about places: a figure for each of its embeddings or tables."""
    model = subject.model
    if isinstance(model, PVT):
        for stage, alike in enumerate(stage_similarities(model), start=1):
            drawn = figures.similarity(alike, f", stage {stage}")
            yield Drawing(f"positions-stage{stage}", drawn, {"similarity": alike})
    elif isinstance(model, Swin | CoAtNet):
        for stage, tables in stage_biases(model).items():
            yield Drawing(f"bias-stage{stage}", figures.bias(tables, f", stage {stage}"), {"bias": tables})
    else:
        raise UserError(f"There are no position embeddings or biases to draw: a {subject.card.model} has none.")


def mixing(subject: Subject) -> Iterator[Drawing]:
    """What a Mixer's tokens are mixed by, in its first three layers and the last."""
    if not isinstance(subject.model, Mixer):
        return
    maps = mixing_maps(subject.model)
    layers = sorted({*range(min(3, len(maps))), len(maps) - 1})
    units = {number: in_pairs(maps[number]) for number in layers}
    drawn = figures.mixing({number + 1: maps[number][chosen] for number, chosen in units.items()}, maps.shape[1])
    yield Drawing("mixing", drawn, {"mixing": maps})
