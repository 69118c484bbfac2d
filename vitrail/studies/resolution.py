"""Fine-tuning at a higher resolution with resampled positions, section 3.2."""

from __future__ import annotations

from typing import Any

from vitrail.studies.charts import series
from vitrail.studies.lab import Lab
from vitrail.studies.rule import above, difference
from vitrail.studies.study import Claim, Findings, Steps, register

SCALES = (1.0, 1.5, 2.0)
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
    """Pre-training at half of the images' size, fine-tuning at growing sizes, with and without resampled positions.

    The paper fine-tunes at a higher resolution than it pre-trains, with the same patch size: the sequence grows, and
    the position embeddings are resampled to their new places. Without resampling they are drawn anew.
    """
    patch = max(lab.patch // 2, 1)
    low = [max(round(side / 2 / (2 * patch)), 2) * 2 * patch for side in lab.size]
    model = lab.vit(patch=patch)
    rates = yield from lab.choose_lr({"ViT": {"model": model, "img_size": tuple(low)}})
    first = [
        lab.job({"pre-training": f"{low[0]} px"}, model, seed=seed, img_size=tuple(low), lr=rates["ViT"])
        for seed in range(lab.seeds)
    ]
    yield first
    sizes = {scale: tuple(round(scale * side / patch) * patch for side in low) for scale in SCALES}
    results = yield [
        lab.job(
            {"positions": name, "size": size[0]},
            model,
            seed=seed,
            share=SHARE,
            weights=job,
            img_size=size,
            **how,
        )
        for seed, job in enumerate(first)
        for name, how in POSITIONS.items()
        for size in sizes.values()
    ]
    small, large = sizes[SCALES[0]][0], sizes[SCALES[-1]][0]
    higher = difference(results(positions="resampled", size=large), results(positions="resampled", size=small))
    kept = difference(results(positions="resampled", size=large), results(positions="new", size=large))
    table = {name: {size[0]: results(positions=name, size=size[0]) for size in sizes.values()} for name in POSITIONS}
    return Findings(
        claims=[
            Claim(
                f"fine-tuning at a higher resolution is better ({large} against {small} pixels)",
                higher.text(),
                above(higher),
            ),
            Claim(f"resampled positions are better than new ones ({large} pixels)", kept.text(), above(kept)),
        ],
        charts=[
            series(
                table,
                name="resolution",
                title="Fine-tuning at growing sizes",
                note=f"pre-trained at {low[0]} pixels; {large} minus {small} pixels: {higher.text()}",
                x="pixels per side in fine-tuning",
            )
        ],
    )
