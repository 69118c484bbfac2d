"""Adam, SGD and Muon for pre-training and fine-tuning, table 7."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from vitrail.studies.charts import series
from vitrail.studies.lab import RATES, Lab
from vitrail.studies.ladders import FAMILIES
from vitrail.studies.rule import above, difference, within
from vitrail.studies.study import Claim, Findings, Steps, register

# SGD's weight decay is multiplied by a learning rate that is 100 times Adam's; 1e-4 is that of ResNets and BiT.
OPTIMISERS: dict[str, dict[str, Any]] = {
    "Adam": {"opt": "adamw"},
    "SGD": {"opt": "sgd", "weight_decay": 1e-4},
    "Muon": {"opt": "muon"},
}
COMPARED = {"BiT": ("Adam", "SGD"), "ViT": ("Adam", "SGD", "Muon")}  # Muon is for matrices, not for BiT's filters
GRIDS = {"Adam": RATES, "SGD": (0.03, 0.1, 0.3), "Muon": (1e-3, 3e-3, 1e-2)}
TUNED: dict[str, dict[str, Any]] = {"Adam": {"opt": "adamw"}, "SGD": {"opt": "sgd", "weight_decay": 0.0}}  # fine-tuning
TUNED_GRIDS = {"Adam": RATES, "SGD": (0.01, 0.03, 0.1)}
FEW = 1000  # most images to fine-tune on
SHARE = 0.25  # length of fine-tuning
MARGIN = 0.01  # a point of accuracy


@register(
    "optimiser",
    question="Is Adam or SGD better for pre-training, and for fine-tuning?",
    paper="table 7",
    fair="images",
    images=400,
    classes=4,
)
def optimiser(lab: Lab) -> Steps:
    """Pre-training on half of the classes with Adam, SGD and, for the ViT, Muon; fine-tuning on the other half.

    The paper pre-trains ResNets with Adam because they then transfer better than with SGD, which was a surprise; it
    fine-tunes with SGD. Muon came later. Accuracies of an optimiser of pre-training are means over those of
    fine-tuning, and the reverse. The learning rate of each optimiser is chosen for each family, and for every start of
    fine-tuning.
    """
    source, target = lab.cut.halves()
    models = {family: FAMILIES[family](lab)["M"] for family in COMPARED}
    rates: dict[str, float] = {}
    for opt, grid in GRIDS.items():
        tried = {
            f"{family}, {opt}": {**model, **OPTIMISERS[opt], "cut": source}
            for family, model in models.items()
            if opt in COMPARED[family]
        }
        rates |= yield from lab.choose_lr(tried, grid)
    task: dict[str, Any] = {"cut": target, "train": FEW, "share": SHARE}
    for tuning, settings in TUNED.items():
        starts = {
            f"{family}, {opt}, {tuning}": {
                **model,
                **task,
                **settings,
                "weights": lab.trial(
                    f"{family}, {opt}", {**model, **OPTIMISERS[opt], "cut": source}, rates[f"{family}, {opt}"]
                ),
            }
            for family, model in models.items()
            for opt in COMPARED[family]
        }
        rates |= yield from lab.choose_lr(starts, TUNED_GRIDS[tuning])
    pretrained = {
        (family, opt, seed): lab.job(
            {"family": family, "pre-training": opt},
            seed=seed,
            cut=source,
            lr=rates[f"{family}, {opt}"],
            **OPTIMISERS[opt],
            **model,
        )
        for seed in range(lab.seeds)
        for family, model in models.items()
        for opt in COMPARED[family]
    }
    yield list(pretrained.values())
    results = yield [
        lab.job(
            {"family": family, "pre-training": opt, "fine-tuning": tuning},
            job.settings["model"],
            seed=seed,
            weights=job,
            lr=rates[f"{family}, {opt}, {tuning}"],
            **task,
            **settings,
        )
        for (family, opt, seed), job in pretrained.items()
        for tuning, settings in TUNED.items()
    ]

    def mean(family: str, **labels: str) -> list[float]:
        return [fmean(results(family=family, seed=seed, **labels)) for seed in range(lab.seeds)]

    claims = []
    for family in models:
        first = {opt: mean(family, **{"pre-training": opt}) for opt in COMPARED[family]}
        then = {opt: mean(family, **{"fine-tuning": opt}) for opt in TUNED}
        apart, tuned = difference(first["Adam"], first["SGD"]), difference(then["Adam"], then["SGD"])
        who = "" if family == "BiT" else "beyond the paper: "  # table 7 is about ResNets
        claims += [
            Claim(f"{who}pre-training {family} with Adam transfers better than with SGD", apart.text(), above(apart)),
            Claim(
                f"beyond the paper: fine-tuning {family} with Adam equals SGD, up to a point",
                tuned.text(),
                within(tuned, MARGIN),
            ),
        ]
        if "Muon" in first:
            more = difference(first["Muon"], first["Adam"])
            claim = f"beyond the paper: pre-training {family} with Muon transfers better than with Adam"
            claims.append(Claim(claim, more.text(), above(more)))
    names = tuple(f"{family}, {tuning}" for family in models for tuning in TUNED)
    table = {
        f"pre-trained with {opt}": {
            f"{family}, {tuning}": results(family=family, **{"pre-training": opt, "fine-tuning": tuning})
            for family in models
            if opt in COMPARED[family]
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
