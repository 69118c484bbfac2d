"""Pooling: the class token and the average, figure 9."""

from __future__ import annotations

from vitrail.charts.measure import number
from vitrail.studies.charts import series
from vitrail.studies.lab import Lab
from vitrail.studies.rule import above, difference, within
from vitrail.studies.study import Claim, Findings, Steps, register

RATES = (3e-4, 1e-3, 3e-3, 1e-2)
MARGIN = 0.01  # a point of accuracy


@register(
    "pooling",
    question="Does average pooling fail, or does it only need another learning rate than the class token?",
    paper="figure 9",
    fair="images",
)
def pooling(lab: Lab) -> Steps:
    """The class token and global average pooling, each over learning rates.

    The paper first found average pooling far worse than the class token, and then that only its learning rate was
    wrong. Both are trained here at every learning rate; each is judged at its best one on held-out images.
    """
    model = lab.vit()
    results = yield [
        lab.job({"pool": pool, "lr": lr}, model, seed=seed, pool=pool, lr=lr)
        for seed in range(lab.seeds)
        for pool in ("cls", "gap")
        for lr in RATES
    ]
    best = {pool: results.best("held_out", "lr", pool=pool)[0] for pool in ("cls", "gap")}
    at_best = {pool: results("top1", pool=pool, lr=best[pool]) for pool in best}
    tuned = difference(at_best["gap"], at_best["cls"])
    ours = f"{tuned.text()}, class token at {number(float(best['cls']))}, average at {number(float(best['gap']))}"
    borrowed = difference(at_best["cls"], results("top1", pool="gap", lr=best["cls"]))
    names = {"cls": "class token", "gap": "average"}
    table = {names[pool]: {lr: results("top1", pool=pool, lr=lr) for lr in RATES} for pool in names}
    return Findings(
        claims=[
            Claim("with its own learning rate, average pooling equals the class token", ours, within(tuned, MARGIN)),
            Claim(
                "at the class token's learning rate, average pooling is worse",
                f"class token minus average at {number(float(best['cls']))}: {borrowed.text()}",
                above(borrowed),
            ),
        ],
        charts=[
            series(
                table,
                name="pooling",
                title="Class token and average pooling",
                note=f"average minus class token, each at its best rate: {tuned.text()}",
                x="learning rate",
                log=True,
            )
        ],
    )
