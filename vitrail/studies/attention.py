"""Attention distance by depth and head, and similarity of positions, figures 7 and 11."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from vitrail.charts.build import distance
from vitrail.charts.kinds import Chart
from vitrail.charts.measure import count
from vitrail.studies.charts import series
from vitrail.studies.lab import Lab
from vitrail.studies.ladders import vits
from vitrail.studies.measure import WATCHED
from vitrail.studies.rule import above, difference, estimate
from vitrail.studies.study import Claim, Findings, Steps, register

SHARES = (0.1, 0.3, 1.0)  # of a full run
SIZES = ("S", "M", "L")
SIDE = "% of the side"  # unit of distances


@register(
    "attention",
    question="How far does attention reach, by depth, in training and with model size?",
    paper="figures 7 and 11",
    fair="images",
)
def attention(lab: Lab) -> Steps:
    """Attention distance of every head at three times of training and for three sizes, and similarity of positions.

    The paper finds that some heads of the lowest layers already attend to most of the image while others stay local,
    that attention reaches farther in deeper layers, and that position embeddings are similar to those of near patches
    and of the same row and column. Distances are shares of the image's side.
    """
    ladder = vits(lab)
    rates = yield from lab.choose_lr({size: ladder[size] for size in SIZES})
    results = yield [
        lab.job(
            {"size": size, "share": share}, seed=seed, share=share, lr=rates[size], look="attention", **ladder[size]
        )
        for seed in range(lab.seeds)
        for size in SIZES
        for share in (SHARES if size == SIZES[-1] else SHARES[-1:])
    ]
    largest: dict[str, Any] = {"size": SIZES[-1], "share": 1.0}
    deeper = difference(results("last_layer", **largest), results("first_layer", **largest))
    varied = difference(results("first_layer_spread", **largest), results("last_layer_spread", **largest))
    near, lines = (estimate(results(name, **largest)) for name in ("near_minus_far", "aligned"))
    by_size = {f"ViT {size}": _layers(results("map_distance", size=size, share=1.0)) for size in SIZES}
    by_time = {
        f"trained {share:.0%} as long": _layers(results("map_distance", size=SIZES[-1], share=share))
        for share in SHARES
    }
    length = "of the largest model; each run has its whole schedule"
    note = f"largest model, last minus first layer: {deeper.text(SIDE)}"
    options = {"x": "layer", "y": "mean attention distance (share of the side)", "percent": True}
    return Findings(
        claims=[
            Claim("attention reaches farther in the last layer than in the first", deeper.text(SIDE), above(deeper)),
            Claim("heads differ more in the first layer than in the last", varied.text(SIDE), above(varied)),
            Claim(
                "positions are more similar to near patches than to far ones",
                f"cosine similarity {near.text('')}",
                above(near),
            ),
            Claim(
                "at equal distance, positions are more similar within a row or column",
                f"cosine similarity {lines.text('')}",
                above(lines),
            ),
        ],
        charts=[
            series(by_size, name="attention", title="By model size", note=note, **options),  # type: ignore[arg-type]
            series(by_time, name="attention", title="By length of training", note=length, **options),  # type: ignore[arg-type]
            _heads(lab, results("map_distance", **largest)),
        ],
    )


def _layers(maps: list[list[list[float]]]) -> dict[int, list[float]]:
    """The mean distance of every layer, for each seed."""
    means = [np.nanmean(np.array(each), axis=1) for each in maps]
    return {layer + 1: [float(mean[layer]) for mean in means] for layer in range(len(means[0]))}


def _heads(lab: Lab, maps: list[list[list[float]]]) -> Chart:
    """Figure 11: every head, those of all seeds together, with the distance of uniform attention."""
    (h, w), patch = lab.size, lab.patch
    places = np.argwhere(np.ones((h // patch, w // patch)))
    even = patch * np.linalg.norm(places[:, None] - places, axis=-1).mean()
    values = max(h, w) * np.concatenate(maps, axis=1)
    chart = distance(values, np.full(len(values), even), max(h, w), WATCHED)
    note = f"heads of {count(lab.seeds, 'seed')}; {chart.note}"
    return replace(chart, name="attention-heads", title="Every head of the largest model", note=note)
