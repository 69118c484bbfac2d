"""Accuracy against the compute of training, figure 5."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from vitrail.studies.charts import series
from vitrail.studies.lab import Lab
from vitrail.studies.ladders import FAMILIES
from vitrail.studies.rule import above, difference, estimate, within
from vitrail.studies.study import Claim, Findings, Results, Steps, register

Curve: TypeAlias = tuple[NDArray[np.float64], NDArray[np.float64]]  # logarithm of compute, and accuracy

MARGIN = 0.01  # a point of accuracy
_BACKWARD = 3  # a training step costs three forward passes


@register(
    "scaling",
    question="Which family uses compute best, and does the ViT saturate?",
    paper="figure 5",
    fair="images",
    images=400,
)
def scaling(lab: Lab) -> Steps:
    """Five sizes each of ViT, BiT and the hybrid, over more than 30 times the compute, on the same images.

    The paper finds that ViTs need 2 to 4 times less compute than ResNets for the same accuracy, that hybrids lead at
    small compute and lose their lead at large, and that ViTs do not saturate. The learning rate is chosen for the
    smallest, the middle and the largest size of each family, and used for the sizes next to them.
    """
    ladders = {family: ladder(lab) for family, ladder in FAMILIES.items()}
    tuned = {"XS": "XS", "S": "M", "M": "M", "L": "M", "XL": "XL"}
    rates = yield from lab.choose_lr(
        {f"{family} {size}": ladder[size] for family, ladder in ladders.items() for size in ("XS", "M", "XL")}
    )
    results = yield [
        lab.job({"family": family, "size": size}, seed=seed, lr=rates[f"{family} {tuned[size]}"], **model)
        for seed in range(lab.seeds)
        for family, ladder in ladders.items()
        for size, model in ladder.items()
    ]
    cost = {
        family: {size: _BACKWARD * lab.images * lab.macs(model["model"]) / 1e9 for size, model in ladder.items()}
        for family, ladder in ladders.items()
    }
    seeds = range(lab.seeds)
    curves = {family: [_curve(results, cost[family], family, seed) for seed in seeds] for family in cost}
    lead = estimate([_mean_gap(curves["ViT"][seed], curves["BiT"][seed]) for seed in seeds])
    first = estimate([_gap_at(curves["hybrid"][seed], curves["ViT"][seed], low=True) for seed in seeds])
    final = estimate([_gap_at(curves["hybrid"][seed], curves["ViT"][seed], low=False) for seed in seeds])
    growing = difference(results(family="ViT", size="XL"), results(family="ViT", size="L"))
    fits = {family: power_law(results, cost[family], family) for family in cost}
    table = {
        family: {cost[family][size]: results(family=family, size=size) for size in ladder}
        for family, ladder in ladders.items()
    }
    lines = {
        f"{family}, power law": {x: 1 - float(np.exp(a - b * np.log(x))) for x in cost[family].values()}
        for family, (a, b) in fits.items()
    }
    return Findings(
        claims=[
            Claim("at the same compute the ViT is better than the ResNet", f"on average {lead.text()}", above(lead)),
            Claim("at small compute the hybrid is better than the ViT", first.text(), above(first)),
            Claim("at large compute the hybrid equals the ViT, up to a point", final.text(), within(final, MARGIN)),
            Claim("the ViT does not saturate: the largest is better than the next", growing.text(), above(growing)),
        ],
        charts=[
            series(
                table,
                name="scaling",
                title="Accuracy against compute",
                note=f"ViT minus BiT at the same compute: {lead.text()}",
                x="compute of training (GMACs)",
                log=True,
                lines=lines,
            )
        ],
        notes=[
            "Power laws of the error, error = exp(a) · compute^-b: "
            + "; ".join(f"{family} b = {b:.3f}" for family, (_, b) in fits.items())
            + ".",
            lead_ends(*(_mean(curves[family]) for family in ("hybrid", "ViT"))),
            f"On the Pareto front: {', '.join(pareto(results, cost))}.",
        ],
    )


def _curve(results: Results, cost: dict[str, float], family: str, seed: int) -> Curve:
    """The logarithm of compute and the accuracy of a family, by rising compute."""
    points = sorted((np.log(cost[size]), results(family=family, size=size, seed=seed)[0]) for size in cost)
    x, y = zip(*points, strict=True)
    return np.array(x), np.array(y)


def _mean_gap(ours: Curve, theirs: Curve) -> float:
    """The mean difference of two curves over the compute that both cover."""
    at = np.linspace(max(ours[0][0], theirs[0][0]), min(ours[0][-1], theirs[0][-1]), 50)
    return float((np.interp(at, *ours) - np.interp(at, *theirs)).mean())


def _gap_at(ours: Curve, theirs: Curve, low: bool) -> float:
    """The difference of two curves at the lowest or the highest compute that both cover."""
    at = max(ours[0][0], theirs[0][0]) if low else min(ours[0][-1], theirs[0][-1])
    return float(np.interp(at, *ours) - np.interp(at, *theirs))


def _mean(curves: Sequence[Curve]) -> Curve:
    """The mean over seeds of curves with the same compute."""
    return curves[0][0], np.mean([accuracy for _, accuracy in curves], axis=0)


def lead_ends(hybrid: Curve, vit: Curve) -> str:
    """At which compute the mean of the hybrid falls below that of the ViT for good."""
    at = np.linspace(max(hybrid[0][0], vit[0][0]), min(hybrid[0][-1], vit[0][-1]), 200)
    lead = np.interp(at, *hybrid) - np.interp(at, *vit)
    low, high = (f"{np.exp(end):,.0f} GMACs" for end in (at[0], at[-1]))
    if not (lead > 0).any():
        return f"The hybrid has no lead over the ViT between {low} and {high}."
    if lead[-1] > 0:
        return f"The hybrid still leads the ViT at the largest compute that both have, {high}."
    last = int(np.flatnonzero(lead > 0)[-1])
    crossing = np.interp(0.0, [-lead[last], -lead[last + 1]], at[last : last + 2])
    return f"The hybrid's lead over the ViT ends at about {np.exp(crossing):,.0f} GMACs."


def power_law(results: Results, cost: dict[str, float], family: str) -> tuple[float, float]:
    """a and b of error = exp(a) · compute^-b, by least squares in logarithms."""
    x = [np.log(cost[size]) for size in cost for _ in results(family=family, size=size)]
    y = [np.log(max(1 - top1, 1e-4)) for size in cost for top1 in results(family=family, size=size)]
    slope, level = np.polyfit(x, y, 1)
    return float(level), float(-slope)


def pareto(results: Results, cost: dict[str, dict[str, float]]) -> list[str]:
    """The models that no other beats with less compute, by rising compute."""
    points = sorted(
        (cost[family][size], float(np.mean(results(family=family, size=size))), f"{family} {size}")
        for family, sizes in cost.items()
        for size in sizes
    )
    front, best = [], -1.0
    for _, top1, name in points:
        if top1 > best:
            front.append(name)
            best = top1
    return front
