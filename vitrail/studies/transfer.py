"""One pre-trained model, many small tasks: a VTAB-like table, table 2 and figure 2."""

from __future__ import annotations

from typing import Any

from vitrail.progress import without_info
from vitrail.studies.charts import series
from vitrail.studies.lab import Lab
from vitrail.studies.ladders import FAMILIES
from vitrail.studies.made import made
from vitrail.studies.rule import above, difference
from vitrail.studies.sets import Cut, cut
from vitrail.studies.study import Claim, Findings, Job, Results, Steps, register

FEW = 1000  # training images of a task, as in VTAB
SHARE = 0.2  # length of fine-tuning


@register(
    "transfer",
    question="How well does one pre-trained model transfer to many small tasks?",
    paper="table 2 and figure 2",
    fair="compute",
    images=400,
    classes=4,
    targets=100,
)
def transfer(lab: Lab) -> Steps:
    """A ViT and a BiT of the same compute, pre-trained on half of the classes, transferred to several small tasks.

    The tasks are the data sets given after the first; by default the other half of the classes, scikit-learn's digits,
    and made sets of counting, orientation and location. Each has at most 1,000 training images, as in VTAB. Models are
    fine-tuned, read by a linear probe and by few shots, and compared with training from scratch. The learning rates of
    fine-tuning and of training from scratch are chosen on the first task.
    """
    source, other = lab.cut.halves()
    tasks = {each.data.name: each for each in lab.targets} or _usual(lab, other)
    models = {family: FAMILIES[family](lab)["M"] for family in ("ViT", "BiT")}
    rates = yield from lab.choose_lr({family: {**model, "cut": source} for family, model in models.items()})
    trials = {family: lab.trial(family, {**model, "cut": source}, rates[family]) for family, model in models.items()}
    task: dict[str, Any] = {"cut": next(iter(tasks.values())), "train": FEW, "share": SHARE}
    rates |= yield from lab.choose_lr(
        {f"{family}, fine-tuned": {**model, **task, "weights": trials[family]} for family, model in models.items()}
        | {f"{family}, scratch": {**model, **task} for family, model in models.items()}
    )
    files = {name: str(task.support(FEW)) for name, task in tasks.items()}
    probes = tuple((file, method) for file in files.values() for method in ("linear", "fewshot"))
    pretrained: dict[tuple[str, int], Job] = {
        (family, seed): lab.job({"family": family}, seed=seed, cut=source, lr=rates[family], probes=probes, **model)
        for seed in range(lab.seeds)
        for family, model in models.items()
    }
    first = yield list(pretrained.values())
    jobs = [
        lab.job(
            {"family": family, "task": name, "start": "fine-tuned"},
            job.settings["model"],
            seed=seed,
            cut=task,
            train=FEW,
            share=SHARE,
            weights=job,
            lr=rates[f"{family}, fine-tuned"],
        )
        for (family, seed), job in pretrained.items()
        for name, task in tasks.items()
    ]
    jobs += [
        lab.job(
            {"family": family, "task": name, "start": "scratch"},
            seed=seed,
            cut=task,
            train=FEW,
            share=SHARE,
            lr=rates[f"{family}, scratch"],
            **model,
        )
        for seed in range(lab.seeds)
        for family, model in models.items()
        for name, task in tasks.items()
    ]
    results = yield jobs
    seeds = range(lab.seeds)

    def mean(family: str, start: str) -> list[float]:
        return [
            sum(results(family=family, start=start, task=name, seed=seed)[0] for name in tasks) / len(tasks)
            for seed in seeds
        ]

    linear = [
        sum(first(f"linear:{_stem(file)}", family="ViT", seed=seed)[0] for file in files.values()) / len(files)
        for seed in seeds
    ]
    over_scratch = difference(mean("ViT", "fine-tuned"), mean("ViT", "scratch"))
    over_linear = difference(mean("ViT", "fine-tuned"), linear)
    over_bit = difference(mean("ViT", "fine-tuned"), mean("BiT", "fine-tuned"))
    return Findings(
        claims=[
            Claim("a pre-trained ViT is better than one from scratch", over_scratch.text(), above(over_scratch)),
            Claim("fine-tuning is better than a linear probe", over_linear.text(), above(over_linear)),
            Claim("at the same compute the ViT transfers better than the ResNet", over_bit.text(), above(over_bit)),
        ],
        charts=[_chart(first, results, files, family) for family in models],
        notes=["Claims are on the mean over the tasks."],
    )


def _usual(lab: Lab, other: Cut) -> dict[str, Cut]:
    """The other classes, digits, and the made sets."""
    folder = lab.cut.folder
    found = {other.name: other}
    if lab.cut.data.name != "digits":
        found["digits"] = cut("digits", folder)
    with without_info():
        return found | {name: cut(str(path), folder) for name, path in made(folder, min(lab.size)).items()}


def _stem(file: str) -> str:
    from pathlib import Path

    return Path(file).stem


def _chart(first: Results, results: Results, files: dict[str, str], family: str):  # type: ignore[no-untyped-def]
    names = tuple(files)
    table = {
        "fine-tuned": {name: results(family=family, task=name, start="fine-tuned") for name in names},
        "from scratch": {name: results(family=family, task=name, start="scratch") for name in names},
        "linear": {name: first(f"linear:{_stem(file)}", family=family) for name, file in files.items()},
        "10-shot": {name: first(f"10-shot:{_stem(file)}", family=family) for name, file in files.items()},
    }
    best = sum(sum(values) / len(values) for values in table["fine-tuned"].values()) / len(names)
    return series(
        table,
        name="transfer",
        title=f"{family}: one model, many tasks",
        note=f"mean over the tasks after fine-tuning {best:.1%}",
        x="task",
        names=names,
        joined=False,
    )
