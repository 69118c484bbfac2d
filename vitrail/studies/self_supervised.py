"""Self-supervised against supervised pre-training and training from scratch, section 4.6."""

from __future__ import annotations

from typing import Any

from vitrail.studies.charts import series
from vitrail.studies.lab import TUNING, TUNING_SEED, Lab
from vitrail.studies.rule import above, difference
from vitrail.studies.study import Claim, Findings, Job, Steps, register

METHODS = ("masked", "mae", "simmim", "dino", "lejepa")
MOST = 5000  # images to pre-train on, so that a short run sees each several times
FEW = 500  # most labelled images to fine-tune on
SHARE = 0.25  # length of fine-tuning


@register(
    "self-supervised",
    question="Does pre-training without labels help, and how near does it come to labels?",
    paper="section 4.6",
    fair="images",
    images=400,
    classes=4,
)
def self_supervised(lab: Lab) -> Steps:
    """Masked patch prediction and four later methods against supervised pre-training and training from scratch.

    All pre-train the same ViT on at most 5,000 images of half of the classes, drawn anew for each seed, so that a short
    run sees each several times; only the supervised one reads their labels. Each is then fine-tuned on at most 500
    images of the other half, at a learning rate that is chosen for it. Methods without labels are pre-trained at the
    learning rate of their recipe. The paper's masked patch prediction reaches 79.9 % on
    ImageNet: 2 points above training from scratch, 4 below supervised pre-training.
    """
    source, target = lab.cut.halves()
    plain: dict[str, Any] = {"model": lab.vit(), "cut": source, "train": MOST}
    rates = yield from lab.choose_lr({"ViT": plain})
    trials = {"labels": lab.trial("ViT", plain, rates["ViT"])}
    trials |= {
        method: lab.job({"tuning": method}, seed=TUNING_SEED, share=TUNING, tuning=True, method=method, **plain)
        for method in METHODS
    }
    yield [trials[method] for method in METHODS]
    task: dict[str, Any] = {"model": lab.vit(), "cut": target, "train": FEW, "share": SHARE}
    rates |= yield from lab.choose_lr(
        {f"from {name}": {**task, "weights": trial} for name, trial in trials.items()} | {"scratch": task}
    )
    starts: dict[tuple[str, int], Job] = {}
    for seed in range(lab.seeds):
        starts["labels", seed] = lab.job({"pre-training": "labels"}, seed=seed, lr=rates["ViT"], **plain)
        for method in METHODS:
            starts[method, seed] = lab.job({"pre-training": method}, seed=seed, method=method, **plain)
    yield list(starts.values())
    jobs = [
        lab.job({"start": name}, seed=seed, weights=job, lr=rates[f"from {name}"], **task)
        for (name, seed), job in starts.items()
    ]
    jobs += [lab.job({"start": "scratch"}, seed=seed, lr=rates["scratch"], **task) for seed in range(lab.seeds)]
    results = yield jobs
    names = ("scratch", *METHODS, "labels")
    scores = {name: results(start=name) for name in names}
    gain = difference(scores["masked"], scores["scratch"])
    short = difference(scores["labels"], scores["masked"])
    claims = [
        Claim("masked patch prediction is better than training from scratch (by 2 points)", gain.text(), above(gain)),
        Claim(
            "supervised pre-training is better than masked patch prediction (by 4 points)", short.text(), above(short)
        ),
    ]
    for method in METHODS[1:]:
        over = difference(scores[method], scores["scratch"])
        claims.append(Claim(f"beyond the paper: {method} is better than scratch", over.text(), above(over)))
    chart = series(
        {"fine-tuned accuracy": scores},
        name="self-supervised",
        title="Pre-training with and without labels",
        note=f"masked patch prediction minus scratch: {gain.text()}",
        x="pre-training",
        names=names,
        joined=False,
    )
    return Findings(claims, [chart])
