"""Texts of a page: headline, scores, training, settings, commands."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from vitrail.charts.measure import Measure, count, number, percent
from vitrail.config import Duration, TrainConfig, Verb, flat, options
from vitrail.files import reading
from vitrail.models import family, parameters
from vitrail.report.facts import RunFacts
from vitrail.tasks import Multiclass
from vitrail.tasks.bootstrap import Interval
from vitrail.tasks.task import Headline, Health
from vitrail.train.summary import kept_epoch, pretrained_flags
from vitrail.weights.recognise import formats_of

_FAMILIES = {"vit": "ViT"}
_GROUPS = {
    "": "General",
    "source": "Data",
    "captions": "Captions",
    "input": "Input",
    "arch": "Architecture",
    "transfer": "Pre-trained weights",
    "distillation": "Teacher",
    "pretraining": "Self-supervision",
    "optim": "Optimisation",
    "stop": "Kept epoch and stopping",
    "augment": "Augmentation",
    "run": "Run",
}


@dataclass(frozen=True)
class Result:
    """An overall score with its confidence interval and meaning."""

    name: str
    value: str
    spread: str  # "± 0.5"
    interval: str  # "91.1 to 92.1%"
    meaning: str


def headline(facts: RunFacts) -> Headline:
    """The result of the run in one sentence."""
    who, scores, task = _who(facts), facts.scores, facts.task
    data = _short(facts.config.data)
    if scores is None:
        known = bool(task.classes) or not task.labelled
        return Headline(f"{who} is learning to {task.goal(data) if known else f'read {data}'}.", "", "")
    if not task.labelled:
        return _pretrained(facts, who, data)
    main = task.measures[0]
    score = f"{main.text(scores.summary()[main.name])}{plus_minus(main, facts.samples.interval(main.name))}"
    before, after = task.headline(data, score, f"{scores.images:,} {facts.split} images")
    return Headline(f"{who} {before}", score, after)


def _pretrained(facts: RunFacts, who: str, data: str) -> Headline:
    """What was pre-trained, how and on what, and its score: one that ranks models, or two that describe them."""
    assert facts.scores is not None
    values, probe = facts.scores.summary(), facts.config.run.probe
    known = [measure for measure in facts.task.measures if measure.name in values]
    ranking = [measure for measure in known if measure.comparable]
    main, *others = ranking[:1] or known[:2]
    learnt = data if facts.data is None else f"{count(len(facts.data.splits['train']))} of {data}"
    score = main.text(values[main.name])
    before, after = facts.task.headline(learnt, score, "")
    where = f" on {_short(probe)}" if ranking and probe is not None else ""
    also = "".join(f", {measure.title} {measure.text(values[measure.name])}" for measure in others)
    begin = f"{who} {before}{main.title} ".replace("-", "\u2011")  # no line break within pre-trained and k-NN
    return Headline(begin, score, f"{where}{also}{after}")


def _short(source: str) -> str:
    """The name of a data set, without line breaks within it."""
    return Path(source.removeprefix("hf:")).stem.replace("-", "\u2011")


def _who(facts: RunFacts) -> str:
    model = facts.config.model
    family = _FAMILIES.get(model.split("_")[0], model)
    return f"A {family}" + (f" with {large(parameters(facts.card.config))} parameters" if facts.card else "")


def measures(facts: RunFacts) -> list[Result]:
    """Every overall score, with its confidence interval."""
    if facts.scores is None:
        return []
    found, summary = [], facts.scores.summary()
    for measure in facts.task.measures:
        if measure.name in summary and facts.task.telling(measure.name):
            interval = facts.samples.interval(measure.name)
            spread, ends = plus_minus(measure, interval), between(measure, interval)
            found.append(Result(measure.title, measure.text(summary[measure.name]), spread, ends, measure.meaning))
    return found


def plus_minus(measure: Measure, interval: Interval | None) -> str:
    """Half the width of an interval, to follow a number: " ± 0.5"."""
    if interval is None:
        return ""
    half = (interval[1] - interval[0]) / 2
    return f" ± {measure.text(half).removesuffix('%') if measure.percent else number(half, 2)}"


def between(measure: Measure, interval: Interval | None) -> str:
    """An interval as text: "91.1 to 92.1%"."""
    if interval is None:
        return ""
    low, high = (measure.text(end).replace("-", "−") for end in interval)
    return f"{low.removesuffix('%')} to {high}"


def large(number: int) -> str:
    """A large number in words: "816 thousand", "5.5 million"."""
    for size, word in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if number >= size:
            return f"{number / size:.3g} {word}"
    return str(number)


def health(facts: RunFacts) -> Health:
    """Whether the features of the kept model differ between images; nothing with labels."""
    if facts.scores is None or not facts.kept:
        return Health(True, "")
    row = facts.rows[facts.kept - 1]
    means = {name.removeprefix("train_"): value for name, value in row.items() if name.startswith("train_")}
    return facts.task.health(facts.scores, means, facts.config)


def training(facts: RunFacts) -> list[tuple[str, str]]:
    """Facts about training: epochs, time, throughput, hardware, versions."""
    optim, rows = facts.config.optim, facts.rows
    made_with = dict(facts.card.versions) if facts.card is not None else {}
    found = []
    if rows:
        seconds, images = rows[-1]["seconds"], rows[-1]["step"] * optim.batch_size
        epochs = f"{len(rows)} of {optim.epochs:g}" if facts.stopped else f"{len(rows)}"
        found = [
            ("epochs", epochs),
            *([("kept", kept_epoch(facts.card, rows, facts.config.stop.best))] if facts.card and facts.kept else []),
            ("steps", f"{rows[-1]['step']:,.0f} of {optim.batch_size} images"),
            ("time", str(Duration(seconds))),
            ("throughput", f"{images / max(seconds, 1e-9):,.0f} images per second, including validation"),
        ]
        if "wait" in rows[0]:  # older runs lack it
            found.append(("waiting for data", percent(sum(row["wait"] for row in rows) / len(rows), 0)))
    if facts.card is not None and (teacher := facts.card.teacher):
        main = facts.task.measures[0]
        found.append(("teacher", f"{teacher['model']}, {main.title} {main.text(teacher['metrics'][main.name])}"))
    found.append(("hardware", made_with.pop("hardware", "not recorded")))
    precision = "32-bit" if facts.config.run.amp == "off" else facts.config.run.amp
    found.append(
        ("device", f"{facts.config.run.device}, {precision}{', compiled' if facts.config.run.compile else ''}")
    )
    return found + [(name, version) for name, version in made_with.items()]


def settings(config: TrainConfig, verb: Verb) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Every setting of a run made by a verb, by group: name, value, help text.

    Options of the other verb and of other methods are left out.
    """
    values, every = flat(config), options(TrainConfig).values()
    own = [o for o in every if o.only in ("", verb) or o.default not in (MISSING, values[o.name])]
    known = [o for o in own if o.only != "pretrain" or values[o.name] is not None]
    groups = {
        title: [(o.name, setting(values[o.name]), o.help) for o in known if o.group == group]
        for group, title in _GROUPS.items()
    }
    return [(title, group) for title, group in groups.items() if group]


def setting(value: object) -> str:
    """The value of a setting, as written on the command line."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        whole = len(value) == 2 and all(isinstance(part, int) for part in value)
        return ("×" if whole else ", ").join(map(setting, value))
    return f"{value:g}" if type(value) is float else str(value)


def commands(facts: RunFacts) -> list[tuple[str, str]]:
    """Commands to run next, with IMAGES, DATA and LABELLED to fill in."""
    run, name = shlex.quote(str(facts.folder)), shlex.quote(f"{facts.name}.safetensors")
    go_on = [("Resume training", f"vitrail {verb(facts)} --resume {run}")] if facts.stopped else []
    if facts.card is None:
        return go_on
    config = facts.card.config
    spec = formats_of(family(config)).get("timm")
    fits = spec is not None and spec.unsupported(config) is None
    timm = shlex.quote(f"{facts.name}-timm.safetensors")
    features = ("Extract features", f"vitrail embed {run} IMAGES --out features.npz")
    predictions = [
        ("Predict", f"vitrail predict {run} IMAGES"),
        ("Evaluate again" if facts.data else "Evaluate", f"vitrail evaluate {run}{'' if facts.data else ' DATA'}"),
        ("Explain", f"vitrail explain {run} IMAGES"),
        features,
        ("Export to ONNX", f"vitrail export {run}"),
    ]
    flags = None if facts.data is None else pretrained_flags(facts.config, facts.data)
    if flags is not None:
        source = shlex.quote(facts.config.data)
        predictions.append(("Start from pre-trained weights", f"vitrail train {source} {flags}"))
    probes = {"k-NN": "knn", "a linear probe": "linear", "few images": "fewshot"}
    transfer = [
        ("Fine-tune", f"vitrail train LABELLED --weights {run}"),
        *((f"Measure by {how}", f"vitrail evaluate {run} LABELLED --method {probe}") for how, probe in probes.items()),
        features,
        ("Explain", f"vitrail explain {run} IMAGES"),
    ]
    return [
        *go_on,
        *(predictions if facts.task.labelled else transfer),
        ("Convert to a single file", f"vitrail convert {run} {name}"),
        *([("Convert to timm weights", f"vitrail convert {run} {timm} --to timm")] if fits else []),
        ("Update this report", f"vitrail report {run}"),
    ]


def verb(facts: RunFacts) -> Verb:
    """The verb that made the run."""
    return "train" if facts.task.labelled else "pretrain"


def elsewhere(facts: RunFacts) -> list[tuple[str, str, str]]:
    """Other results of `vitrail evaluate`, on other data or by other methods: data and split, method, results."""
    own = f"{facts.data.name}-val" if facts.data is not None else None
    with reading(facts.run.path / "evaluation", "a folder of scores"):
        return [_other(facts, document) for name, document in facts.run.evaluations.items() if name != own]


def _other(facts: RunFacts, document: Mapping[str, Any]) -> tuple[str, str, str]:
    known = {measure.name: measure for measure in (*facts.task.measures, *Multiclass.measures)}  # of probes, too
    results = [f"{each.title} {each.text(document[key])}" for key, each in known.items() if key in document]
    results += [f"{s['shots']}-shot {percent(sum(s['top1']) / len(s['top1']))}" for s in document.get("shots", ())]
    return f"{document['data']}, {document['split']}", document.get("method", "head"), ", ".join(results)
