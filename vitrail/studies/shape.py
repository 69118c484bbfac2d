"""Depth, width, MLP and patch size at equal compute, figure 8."""

from __future__ import annotations

from vitrail.studies.charts import series
from vitrail.studies.lab import Lab
from vitrail.studies.rule import above, difference
from vitrail.studies.study import Claim, Findings, Steps, register

FACTORS = (2, 4)  # of the compute of the base model


@register(
    "shape",
    question="Which dimension of a ViT pays: depth, width, MLP or smaller patches?",
    paper="figure 8",
    fair="images",
)
def shape(lab: Lab) -> Steps:
    """A small ViT, made two and four times as expensive by one dimension at a time, and by all together.

    The paper finds that depth pays most, up to about 16 layers, width least, that smaller patches pay well though they
    add no parameters, and that all dimensions together pay robustly. Here these are depth, width and MLP, since few
    sizes of patches divide an image. Models of the same factor have nearly the same compute, and all see the same
    images; the learning rate is chosen for each dimension at the largest factor.
    """
    base = {"width": 32, "depth": 3, "heads": 2, "mlp": 64, "patch": coarse(lab)}
    grown = {
        dimension: {factor: _grown(lab, base, dimension, factor) for factor in FACTORS}
        for dimension in ("depth", "width", "mlp", "patch", "all")
    }
    # Where only few patch sizes divide the image, two factors can have the same model.
    grown = {
        dimension: {f: model for f, model in models.items() if f == FACTORS[-1] or model != models[FACTORS[-1]]}
        for dimension, models in grown.items()
    }
    rates = yield from lab.choose_lr(
        {"base": {"model": lab.vit(**base)}}
        | {dimension: {"model": lab.vit(**models[FACTORS[-1]])} for dimension, models in grown.items()}
    )
    jobs = [
        lab.job({"dimension": "base", "factor": 1}, lab.vit(**base), seed=s, lr=rates["base"]) for s in range(lab.seeds)
    ]
    jobs += [
        lab.job({"dimension": dimension, "factor": factor}, lab.vit(**model), seed=seed, lr=rates[dimension])
        for seed in range(lab.seeds)
        for dimension, models in grown.items()
        for factor, model in models.items()
    ]
    results = yield jobs
    start, most = results(dimension="base"), FACTORS[-1]
    at = {dimension: results(dimension=dimension, factor=most) for dimension in grown}
    depth, patch = difference(at["depth"], at["width"]), difference(at["patch"], at["width"])
    gain, together = difference(at["depth"], start), difference(at["all"], start)
    plain = lab.macs(lab.vit(**base))
    table = {
        dimension: {1.0: start}
        | {
            lab.macs(lab.vit(**model)) / plain: results(dimension=dimension, factor=factor)
            for factor, model in models.items()
        }
        for dimension, models in grown.items()
    }
    return Findings(
        claims=[
            Claim("more depth helps", f"{gain.text()} for {most} times the compute", above(gain)),
            Claim("more of all dimensions helps", f"{together.text()} for {most} times the compute", above(together)),
            Claim("at equal compute depth pays more than width", depth.text(), above(depth)),
            Claim("at equal compute smaller patches pay more than width", patch.text(), above(patch)),
        ],
        charts=[
            series(
                table,
                name="shape",
                title="One dimension at a time, and all together",
                note=f"depth minus width at {most} times the compute: {depth.text()}",
                x="compute of an image, base model = 1",
                log=True,
            )
        ],
        notes=[f"The base model is {lab.vit(**base)}; grown: " + _names(lab, grown) + "."],
    )


def coarse(lab: Lab) -> int:
    """The next larger patch size than the usual one."""
    h, w = lab.size
    return next((p for p in range(lab.patch + 1, min(h, w) + 1) if h % p == w % p == 0), lab.patch)


def _grown(lab: Lab, base: dict[str, int], dimension: str, factor: int) -> dict[str, int]:
    """The base model with a dimension, or all, changed so that its compute is nearest to `factor` times the base's."""
    goal = factor * lab.macs(lab.vit(**base))
    h, w = lab.size
    choices: dict[str, list[dict[str, int]]] = {
        "depth": [{"depth": depth} for depth in range(base["depth"] + 1, 6 * base["depth"])],
        "width": [{"width": width} for width in range(base["width"] + 8, 6 * base["width"], 8)],
        "mlp": [{"mlp": mlp} for mlp in range(base["mlp"] + 32, 24 * base["mlp"], 32)],
        "patch": [{"patch": patch} for patch in range(1, base["patch"]) if h % patch == w % patch == 0],
        "all": [
            {"width": width, "depth": -(-base["depth"] * width // base["width"]), "mlp": 2 * width}
            for width in range(base["width"] + 4, 2 * base["width"], 4)
        ],
    }
    models = [base | choice for choice in choices[dimension]]
    low, high = 0, len(models) - 1
    if dimension == "patch":
        return min(models, key=lambda model: abs(lab.macs(lab.vit(**model)) - goal))
    while high - low > 1:  # compute grows with the dimension
        middle = (low + high) // 2
        low, high = (middle, high) if lab.macs(lab.vit(**models[middle])) < goal else (low, middle)
    return min(models[low], models[high], key=lambda model: abs(lab.macs(lab.vit(**model)) - goal))


def _names(lab: Lab, grown: dict[str, dict[int, dict[str, int]]]) -> str:
    return ", ".join(lab.vit(**model) for models in grown.values() for model in models.values())
