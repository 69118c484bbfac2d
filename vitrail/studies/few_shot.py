"""Few-shot accuracy over the checkpoints of a pre-training, section 4.1."""

from __future__ import annotations

from typing import Any

import numpy as np

from vitrail.charts.measure import count
from vitrail.studies.charts import series
from vitrail.studies.lab import Lab
from vitrail.studies.rule import above, difference, estimate
from vitrail.studies.sets import SHOTS
from vitrail.studies.study import Claim, Findings, Steps, register

SHARES = (0.125, 0.25, 0.5, 1.0)
FEW = 1000  # most images to fine-tune on
SHARE = 0.25  # length of fine-tuning


@register(
    "few-shot",
    question="Does few-shot accuracy tell, during pre-training, what fine-tuning would reach?",
    paper="section 4.1",
    fair="images",
    images=400,
    classes=4,
    targets=1,
)
def few_shot(lab: Lab) -> Steps:
    """1, 5 and 10 shots by regularised least squares on frozen features, over the checkpoints of one pre-training.

    The paper uses few-shot accuracy where fine-tuning would be too expensive. A ViT is pre-trained on half of the
    classes with a constant learning rate, so that a shorter run is exactly a checkpoint of the longest; each checkpoint
    is measured on the other half, or on another data set, by few shots and by fine-tuning.
    """
    source, target = lab.cut.halves()
    target = lab.targets[0] if lab.targets else target
    warmup = round(0.1 * SHARES[0] * lab.images / source.images, 4)
    constant: dict[str, Any] = {"cut": source, "sched": "constant", "cooldown": 0.0, "warmup_epochs": warmup}
    plain = {"model": lab.vit(), **constant}
    rates = yield from lab.choose_lr({"ViT": plain})
    tuning: dict[str, Any] = {"cut": target, "train": FEW, "share": SHARE}
    trial = lab.trial("ViT", plain, rates["ViT"])
    rates |= yield from lab.choose_lr({"fine-tuned": {"model": lab.vit(), "weights": trial, **tuning}})
    file = target.support()
    checkpoints = [
        lab.job(
            {"checkpoint": share},
            lab.vit(),
            seed=seed,
            share=share,
            lr=rates["ViT"],
            probes=((str(file), "fewshot"),),
            **constant,
        )
        for seed in range(lab.seeds)
        for share in SHARES
    ]
    shots = yield checkpoints
    tuned = yield [
        lab.job(
            {"tuned": job.labels["checkpoint"]},
            lab.vit(),
            seed=int(job.labels["seed"]),
            weights=job,
            lr=rates["fine-tuned"],
            **tuning,
        )
        for job in checkpoints
    ]
    scores = {n: {share: shots(f"{n}-shot:{file.stem}", checkpoint=share) for share in SHARES} for n in SHOTS}
    reached = {share: tuned(tuned=share) for share in SHARES}
    rising = difference(scores[5][SHARES[-1]], scores[5][SHARES[0]])
    more = difference(scores[10][SHARES[-1]], scores[1][SHARES[-1]])
    alike = estimate(
        [_rank([scores[5][s][seed] for s in SHARES], [reached[s][seed] for s in SHARES]) for seed in range(lab.seeds)]
    )
    found = {count(n, "shot"): values for n, values in scores.items()} | {"fine-tuned": reached}
    table = {name: {share * lab.images: each[share] for share in SHARES} for name, each in found.items()}
    return Findings(
        claims=[
            Claim("few-shot accuracy rises with pre-training (5 shots)", rising.text(), above(rising)),
            Claim("beyond the paper: more shots are better (10 against 1)", more.text(), above(more)),
            Claim(
                "beyond the paper: few-shot accuracy ranks checkpoints as fine-tuning does",
                f"rank correlation {alike.text('')}",
                above(alike),
            ),
        ],
        charts=[
            series(
                table,
                name="few-shot",
                title="Few-shot accuracy over one pre-training",
                note=f"5 shots, last minus first checkpoint: {rising.text()}",
                x="images seen in pre-training",
                log=True,
            )
        ],
    )


def _rank(a: list[float], b: list[float]) -> float:
    """Spearman's rank correlation; 0 if one of them is constant."""
    from scipy.stats import rankdata

    x, y = rankdata(a), rankdata(b)
    return float(np.corrcoef(x, y)[0, 1]) if np.ptp(x) and np.ptp(y) else 0.0
