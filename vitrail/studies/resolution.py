"""Fine-tuning at a higher resolution with resampled positions, section 3.2."""

from __future__ import annotations

from typing import Any

from vitrail.studies.charts import series
from vitrail.studies.lab import Lab
from vitrail.studies.rule import above, difference
from vitrail.studies.study import Claim, Findings, Steps, register

SCALES = (0.5, 0.75, 1.0)  # of the images' size
SHARE = 0.25  # length of fine-tuning
POSITIONS: dict[str, dict[str, Any]] = {
    "resampled": {},
    "resampled as in the paper": {"pos_resample": "linear"},
    "new": {"forget": True},
}


@register(
    "resolution",
    question="Does fine-tuning at a higher resolution help, and do resampled positions?",
    paper="section 3.2",
    fair="images",
)
def resolution(lab: Lab) -> Steps:
    """Pre-training at half of the images' size, fine-tuning at up to their own, with and without resampled positions.

    The paper fine-tunes at a higher resolution than it pre-trains, with the same patch size: the sequence grows, and
    the position embeddings are resampled to their new places. Without resampling they are drawn anew.
    """
    patch = max(lab.patch // 2, 1)
    low, *higher = [tuple(round(scale * side / patch) * patch for side in lab.size) for scale in SCALES]
    # At the first size nothing is resampled, so there is no second way to do it.
    sizes = {name: higher if "pos_resample" in how else [low, *higher] for name, how in POSITIONS.items()}
    model = lab.vit(patch=patch)
    plain: dict[str, Any] = {"model": model, "img_size": low}
    rates = yield from lab.choose_lr({"ViT": plain})
    trial = lab.trial("ViT", plain, rates["ViT"])
    tuning: dict[str, Any] = {"model": model, "weights": trial, "share": SHARE, "img_size": higher[-1]}
    rates |= yield from lab.choose_lr({name: {**tuning, **how} for name, how in POSITIONS.items()})
    first = [
        lab.job({"pre-training": f"{low[0]} px"}, model, seed=seed, img_size=low, lr=rates["ViT"])
        for seed in range(lab.seeds)
    ]
    yield first
    results = yield [
        lab.job(
            {"positions": name, "size": size[0]},
            model,
            seed=seed,
            share=SHARE,
            weights=job,
            img_size=size,
            lr=rates[name],
            **how,
        )
        for seed, job in enumerate(first)
        for name, how in POSITIONS.items()
        for size in sizes[name]
    ]
    small, large = low[0], higher[-1][0]
    gain = difference(results(positions="resampled", size=large), results(positions="resampled", size=small))
    kept = difference(results(positions="resampled", size=large), results(positions="new", size=large))
    table = {name: {size[0]: results(positions=name, size=size[0]) for size in sizes[name]} for name in POSITIONS}
    return Findings(
        claims=[
            Claim(
                f"fine-tuning at a higher resolution is better ({large} against {small} pixels)",
                gain.text(),
                above(gain),
            ),
            Claim(
                f"beyond the paper: resampled positions are better than new ones ({large} pixels)",
                kept.text(),
                above(kept),
            ),
        ],
        charts=[
            series(
                table,
                name="resolution",
                title="Fine-tuning at growing sizes",
                note=f"pre-trained at {low[0]} pixels; {large} minus {small} pixels: {gain.text()}",
                x="pixels per side in fine-tuning",
            )
        ],
    )
