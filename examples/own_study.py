"""A study of your own: does dropout help on small data? Run it with `python examples/own_study.py`."""

import vitrail
from vitrail.studies import register
from vitrail.studies.charts import series
from vitrail.studies.rule import above, difference
from vitrail.studies.study import Claim, Findings


@register("dropout", question="Does dropout help on small data?", paper="table 3", fair="images")
def dropout(lab):
    """A ViT with and without dropout; its learning rate is chosen on held-out images."""
    rates = yield from lab.choose_lr({"ViT": {"model": lab.vit()}})
    results = yield [
        lab.job({"dropout": rate}, lab.vit(), seed=seed, drop=rate, lr=rates["ViT"])
        for seed in range(lab.seeds)
        for rate in (0.0, 0.1)
    ]
    gain = difference(results(dropout=0.1), results(dropout=0.0))
    chart = series(
        {"ViT": {rate: results(dropout=rate) for rate in (0.0, 0.1)}},
        name="dropout",
        title="Dropout",
        note=f"0.1 minus 0: {gain.text()}",
        x="dropout rate",
    )
    return Findings([Claim("dropout of 0.1 helps", gain.text(), above(gain))], [chart])


if __name__ == "__main__":
    print(vitrail.study("dropout", "digits", budget="5m").findings)
