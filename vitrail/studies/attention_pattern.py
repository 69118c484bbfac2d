"""Local, axial and sparse attention at equal compute, section 2 and figure 13."""

from __future__ import annotations

from vitrail.studies.charts import series
from vitrail.studies.lab import Lab
from vitrail.studies.rule import above, difference, within
from vitrail.studies.study import Claim, Findings, Steps, register

MARGIN = 0.01  # a point of accuracy


@register(
    "attention-pattern",
    question="Does attention to fewer patches pay, at equal compute?",
    paper="section 2 and figure 13",
    fair="compute",
)
def attention_pattern(lab: Lab) -> Steps:
    """Global, window, axial, neighbourhood and strided attention in one ViT with small patches.

    The paper names such patterns as ways to more patches, and compares axial attention, which is better than global
    attention but costs more there: its blocks have two MLPs. Here the parameters are those of the plain ViT, and a
    cheaper pattern sees more images. Windows have half the side of the grid. The learning rate is chosen for global
    attention.
    """
    model, patterns = lab.vit(patch=fine(lab)), variants(lab)
    rates = yield from lab.choose_lr({"global": {"model": model}})
    results = yield [
        lab.job({"pattern": name}, model, seed=seed, lr=rates["global"], attention=attention)
        for seed in range(lab.seeds)
        for name, attention in patterns.items()
    ]
    scores = {name: results(pattern=name) for name in patterns}
    costs = {name: lab.macs(model, attention=attention) for name, attention in patterns.items()}
    share = {name: cost / costs["global"] for name, cost in costs.items()}
    axial, shift = difference(scores["axial"], scores["global"]), difference(scores["shifted"], scores["window"])
    mixed = difference(scores["window, 1 global"], scores["global"])
    local = difference(scores["neighbourhood"], scores["window"])
    return Findings(
        claims=[
            Claim("axial attention is better than global attention (figure 13)", axial.text(), above(axial)),
            Claim("shifted windows are better than fixed ones (Swin)", shift.text(), above(shift)),
            Claim(
                "windows with some global blocks equal global attention (ViTDet), up to a point",
                mixed.text(),
                within(mixed, MARGIN),
            ),
            Claim("neighbourhoods are better than windows (NAT)", local.text(), above(local)),
        ],
        charts=[
            series(
                {name: {share[name]: scores[name]} for name in patterns},
                name="attention-pattern",
                title="Attention patterns at equal compute",
                note=f"axial minus global: {axial.text()}",
                x="compute of an image, global attention = 1",
                joined=False,
            )
        ],
        notes=[
            f"The model is {model}; the patterns are "
            + ", ".join(f"{attention} ({share[name]:.2f} times the compute)" for name, attention in patterns.items())
            + ".",
            f"With global attention a run sees {lab.images * lab.unit / costs['global']:,.0f} images, with axial "
            f"attention {lab.images * lab.unit / costs['axial']:,.0f}.",
        ],
    )


def fine(lab: Lab) -> int:
    """The next smaller patch size than the usual one."""
    h, w = lab.size
    return next((p for p in range(lab.patch - 1, 0, -1) if h % p == w % p == 0), lab.patch)


def variants(lab: Lab) -> dict[str, str]:
    """The patterns, by their names in the charts."""
    side = max(min(lab.size) // fine(lab) // 2, 2)
    return {
        "global": "global",
        "window": f"window:{side}",
        "shifted": f"window:{side},shift",
        "window, 1 global": f"window:{side},global:1",
        "axial": "axial",
        "neighbourhood": f"neighbourhood:{side // 2 * 2 + 1}",
        "strided": "strided",
    }
