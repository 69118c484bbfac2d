"""Position embeddings: kinds and places, table 8."""

from __future__ import annotations

from vitrail.studies.charts import series
from vitrail.studies.lab import Lab
from vitrail.studies.rule import above, difference, within
from vitrail.studies.study import Claim, Findings, Steps, register

MARGIN = 0.01  # a point of accuracy
VARIANTS = {
    "none": "none",
    "1-D": "learned",
    "2-D": "learned2d",
    "relative": "relative",
    "1-D in every layer": "learned_every",
    "1-D shared by layers": "learned_shared",
    "2-D in every layer": "learned2d_every",
    "2-D shared by layers": "learned2d_shared",
}


@register(
    "positions",
    question="How much do position embeddings matter, and of which kind, and where?",
    paper="table 8",
    fair="images",
)
def positions(lab: Lab) -> Steps:
    """No positions, learned 1-D, 2-D and relative ones; at the input, in every layer, and shared by all layers.

    The paper measures the 5-shot accuracy of ViT-B/16 on ImageNet: 61.4 % without positions, 64.0 to 64.3 % with any
    kind at any place. Here it is the test accuracy. The learning rate is chosen for 1-D positions at the input.
    """
    rates = yield from lab.choose_lr({"1-D": {"model": lab.vit()}})
    results = yield [
        lab.job({"positions": name}, lab.vit(), seed=seed, pos=pos, lr=rates["1-D"])
        for seed in range(lab.seeds)
        for name, pos in VARIANTS.items()
    ]
    scores = {name: results(positions=name) for name in VARIANTS}
    with_any = difference(scores["1-D"], scores["none"])
    claims = [Claim("1-D positions are far better than none (64.2 against 61.4 %)", with_any.text(), above(with_any))]
    for name, told in (
        ("2-D", "64.0"),
        ("relative", "64.0"),
        ("1-D in every layer", "64.0"),
        ("1-D shared by layers", "64.3"),
    ):
        apart = difference(scores[name], scores["1-D"])
        told = f"{name} equals 1-D at the input ({told} against 64.2 %), up to a point"
        claims.append(Claim(told, apart.text(), within(apart, MARGIN)))
    chart = series(
        {"test accuracy": scores},
        name="positions",
        title="Position embeddings",
        note=f"1-D minus none: {with_any.text()}",
        x="",
        names=tuple(VARIANTS),
        joined=False,
    )
    return Findings(claims, [chart])
