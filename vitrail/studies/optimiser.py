"""Adam, SGD and Muon for pre-training and fine-tuning, table 7."""

from __future__ import annotations

from typing import Any

from vitrail.studies.charts import series
from vitrail.studies.lab import RATES, Lab
from vitrail.studies.ladders import FAMILIES
from vitrail.studies.rule import above, difference
from vitrail.studies.study import Claim, Findings, Steps, register

OPTIMISERS = {"Adam": "adamw", "SGD": "sgd", "Muon": "muon"}
GRIDS = {"Adam": RATES, "SGD": (0.03, 0.1, 0.3), "Muon": (1e-3, 3e-3, 1e-2)}
TUNED: dict[str, dict[str, Any]] = {
    "Adam": {"opt": "adamw"},
    "SGD": {"opt": "sgd", "lr": 0.03, "weight_decay": 0.0},
}  # fine-tuning
FEW = 1000  # most images to fine-tune on
SHARE = 0.25  # length of fine-tuning


@register(
    "optimiser",
    question="Is Adam or SGD better for pre-training, and for fine-tuning?",
    paper="table 7",
    fair="images",
    images=400,
    classes=4,
)
def optimiser(lab: Lab) -> Steps:
    """Pre-training on half of the classes with Adam, SGD and Muon, fine-tuning on the other half with Adam and SGD.

    The paper pre-trains ResNets with Adam because they then transfer better than with SGD, which was a surprise. Muon
    came later. The learning rate of each optimiser is chosen for each family.
    """
    source, target = lab.cut.halves()
    models = {family: FAMILIES[family](lab)["M"] for family in ("BiT", "ViT")}
    rates: dict[str, float] = {}
    for opt, grid in GRIDS.items():
        tried = {
            f"{family}, {opt}": {**model, "opt": OPTIMISERS[opt], "cut": source} for family, model in models.items()
        }
        rates |= yield from lab.choose_lr(tried, grid)
    pretrained = {
        (family, opt, seed): lab.job(
            {"family": family, "pre-training": opt},
            seed=seed,
            cut=source,
            opt=OPTIMISERS[opt],
            lr=rates[f"{family}, {opt}"],
            **model,
        )
        for seed in range(lab.seeds)
        for family, model in models.items()
        for opt in OPTIMISERS
    }
    yield list(pretrained.values())
    results = yield [
        lab.job(
            {"family": family, "pre-training": opt, "fine-tuning": tuning},
            job.settings["model"],
            seed=seed,
            cut=target,
            train=FEW,
            share=SHARE,
            weights=job,
            **settings,
        )
        for (family, opt, seed), job in pretrained.items()
        for tuning, settings in TUNED.items()
    ]
    claims = []
    for family in models:
        found = {
            opt: [
                sum(results(family=family, seed=seed, **{"pre-training": opt})) / len(TUNED)
                for seed in range(lab.seeds)
            ]
            for opt in OPTIMISERS
        }
        apart, more = difference(found["Adam"], found["SGD"]), difference(found["Muon"], found["Adam"])
        told = "pre-training with Adam transfers better than with SGD"
        claims.append(Claim(f"{family}: {told}", apart.text(), above(apart)))
        claims.append(Claim(f"beyond the paper, {family}: Muon transfers better than Adam", more.text(), above(more)))
    names = tuple(f"{family}, {tuning}" for family in models for tuning in TUNED)
    table = {
        f"pre-trained with {opt}": {
            f"{family}, {tuning}": results(family=family, **{"pre-training": opt, "fine-tuning": tuning})
            for family in models
            for tuning in TUNED
        }
        for opt in OPTIMISERS
    }
    chart = series(
        table,
        name="optimiser",
        title="Optimisers of pre-training and fine-tuning",
        note="accuracy on the other classes after fine-tuning",
        x="family, optimiser of fine-tuning",
        names=names,
        joined=False,
    )
    return Findings(claims, [chart])
