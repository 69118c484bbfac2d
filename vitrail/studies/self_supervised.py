"""Self-supervised against supervised pre-training and training from scratch, section 4.6."""

from __future__ import annotations

from vitrail.studies.charts import series
from vitrail.studies.lab import Lab
from vitrail.studies.rule import above, difference
from vitrail.studies.study import Claim, Findings, Job, Steps, register

METHODS = ("masked", "mae", "simmim", "dino", "lejepa")
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

    All pre-train the same ViT on the images of half of the classes; only the supervised one reads their labels. Each is
    then fine-tuned on at most 500 images of the other half. Methods without labels have the learning rate of their
    recipe. The paper's masked patch prediction reaches 79.9 % on
    ImageNet: 2 points above training from scratch, 4 below supervised pre-training.
    """
    source, target = lab.cut.halves()
    rates = yield from lab.choose_lr({"ViT": {"model": lab.vit(), "cut": source}})
    starts: dict[tuple[str, int], Job] = {}
    for seed in range(lab.seeds):
        starts["labels", seed] = lab.job({"pre-training": "labels"}, lab.vit(), seed=seed, cut=source, lr=rates["ViT"])
        for method in METHODS:
            starts[method, seed] = lab.job({"pre-training": method}, lab.vit(), seed=seed, cut=source, method=method)
    yield list(starts.values())
    jobs = [
        lab.job({"start": name}, lab.vit(), seed=seed, cut=target, train=FEW, share=SHARE, weights=job)
        for (name, seed), job in starts.items()
    ]
    jobs += [
        lab.job({"start": "scratch"}, lab.vit(), seed=seed, cut=target, train=FEW, share=SHARE, lr=rates["ViT"])
        for seed in range(lab.seeds)
    ]
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
