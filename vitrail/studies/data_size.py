"""Accuracy against the number of training images, figures 3 and 4."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean

from vitrail.charts.kinds import Series
from vitrail.studies.charts import series
from vitrail.studies.lab import Lab
from vitrail.studies.ladders import FAMILIES
from vitrail.studies.rule import above, difference, estimate
from vitrail.studies.study import Claim, Findings, Results, Steps, register

PER_CLASS = 10  # least training images of a class in the smallest subset
MOST = 5  # subsets
EPOCH = 2000  # least images of an epoch: validating after every 230 would take longer than training


@register(
    "data-size",
    question="At how many images does the ViT overtake the ResNet and the hybrid?",
    paper="figures 3 and 4",
    fair="compute",
    images=400,
)
def data_size(lab: Lab) -> Steps:
    """ViT, BiT and the hybrid on growing subsets, each with the same compute.

    The paper pre-trains on 9 to 300 million images and finds that the ResNet is better on small data and the ViT on
    large. Here a subset is drawn anew for each seed; a small one is repeated until an epoch
    has 2,000 images. The kept epoch is the best one on held-out images, which is the paper's early stopping; the
    accuracy of the last epoch is shown beside it. Features are also measured frozen, by 5-shot linear classification of
    the same classes.
    """
    models = {family: ladder(lab)["M"] for family, ladder in FAMILIES.items()}
    rates = yield from lab.choose_lr(models)
    sizes = subsets(lab.cut.images, len(lab.cut.classes))
    support = lab.cut.support()
    results = yield [
        lab.job(
            {"family": family, "images": size},
            seed=seed,
            train=size,
            epoch=EPOCH,
            lr=rates[family],
            probes=((str(support), "fewshot"),),
            **model,
        )
        for seed in range(lab.seeds)
        for size in sizes
        for family, model in models.items()
    ]
    few, many = sizes[0], sizes[-1]
    small = difference(results(family="BiT", images=few), results(family="ViT", images=few))
    large = difference(results(family="ViT", images=many), results(family="BiT", images=many))
    mixed = difference(results(family="ViT", images=many), results(family="hybrid", images=many))
    gains = [_gap(results, many, seed) - _gap(results, few, seed) for seed in range(lab.seeds)]
    closing = estimate(gains)
    shots = f"5-shot:{support.stem}"
    return Findings(
        claims=[
            Claim(f"on small data ({few:,} images) the ResNet is better than the ViT", small.text(), above(small)),
            Claim(f"on large data ({many:,} images) the ViT is better than the ResNet", large.text(), above(large)),
            Claim("with more data the ViT gains on the ResNet", closing.text(), above(closing)),
            Claim(f"with much data ({many:,}) the ViT is better than the hybrid", mixed.text(), above(mixed)),
        ],
        charts=[
            _chart(results, sizes, "top1", "Full training, early stopping", "test accuracy"),
            _chart(results, sizes, "last", "Full training, last epoch", "held-out accuracy"),
            _chart(results, sizes, shots, "5-shot, frozen features", "5-shot test accuracy"),
        ],
        notes=[overtakes(results, sizes, other) for other in ("BiT", "hybrid")],
    )


def subsets(images: int, classes: int) -> list[int]:
    """Growing subsets, each about four times the last, up to all images."""
    sizes = [images]
    while len(sizes) < MOST and sizes[0] / 4 >= PER_CLASS * classes:
        sizes.insert(0, sizes[0] // 4)
    return sizes


def overtakes(results: Results, sizes: list[int], other: str) -> str:
    """At how many images the mean of the ViT rises above another family's, by interpolation."""
    gaps = [sum(results(family="ViT", images=n)) - sum(results(family=other, images=n)) for n in sizes]
    for (n, before), (m, after) in pairwise(zip(sizes, gaps, strict=True)):
        if before < 0 <= after:
            crossing = n * (m / n) ** (-before / (after - before))
            return f"The mean of the ViT overtakes that of the {other} at about {crossing:,.0f} images."
    if min(gaps) >= 0 or max(gaps) < 0:
        where = "above" if gaps[0] >= 0 else "below"
        return f"The mean of the ViT is {where} that of the {other} at every size: they do not cross."
    return f"The mean of the ViT falls below that of the {other} with more images."


def _gap(results: Results, images: int, seed: int) -> float:
    vit, bit = (results(family=family, images=images, seed=seed)[0] for family in ("ViT", "BiT"))
    return float(vit - bit)


def _chart(results: Results, sizes: list[int], score: str, title: str, y: str) -> Series:
    table = {family: {n: results(score, family=family, images=n) for n in sizes} for family in FAMILIES}
    last = {family: fmean(values[sizes[-1]]) for family, values in table.items()}
    note = "with all images: " + ", ".join(f"{family} {mean:.1%}" for family, mean in last.items())
    return series(table, name="data-size", title=title, note=note, x="training images", y=y, log=True)
