"""Texts of a page: headline, scores, training, settings, commands."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from vitrail.charts.measure import Measure, number, percent
from vitrail.config import Duration, TrainConfig, flat, options
from vitrail.models import family, parameters
from vitrail.report.facts import RunFacts
from vitrail.tasks import Multiclass
from vitrail.tasks.bootstrap import Interval
from vitrail.tasks.task import Headline
from vitrail.train.summary import kept_epoch
from vitrail.weights.recognise import formats_of

_FAMILIES = {"vit": "ViT"}
_GROUPS = {
    "": "General",
    "source": "Data",
    "input": "Input",
    "arch": "Architecture",
    "transfer": "Pre-trained weights",
    "distillation": "Teacher",
    "optim": "Optimisation",
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
    data = Path(facts.config.data.removeprefix("hf:")).stem.replace("-", "\u2011")  # no line break within a name
    if scores is None:
        return Headline(f"{who} is learning to {task.goal(data) if task.classes else f'read {data}'}.", "", "")
    main = task.measures[0]
    score = f"{main.text(scores.summary()[main.name])}{plus_minus(main, facts.samples.interval(main.name))}"
    before, after = task.headline(data, score, f"{scores.images:,} {facts.split} images")
    return Headline(f"{who} {before}", score, after)


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


def training(facts: RunFacts) -> list[tuple[str, str]]:
    """Facts about training: epochs, time, throughput, hardware, versions."""
    optim, rows = facts.config.optim, facts.rows
    made_with = dict(facts.card.versions) if facts.card is not None else {}
    found = []
    if rows:
        seconds, images = rows[-1]["seconds"], rows[-1]["step"] * optim.batch_size * optim.grad_accum_steps
        epochs = f"{len(rows)} of {optim.epochs:g}" if facts.stopped else f"{len(rows)}"
        found = [
            ("epochs", epochs),
            *([("kept", kept_epoch(facts.card, rows))] if facts.card and facts.kept else []),
            ("steps", f"{rows[-1]['step']:,.0f} of {optim.batch_size * optim.grad_accum_steps} images"),
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


def settings(config: TrainConfig) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Every setting by group: name, value, help text."""
    values, known = flat(config), options(TrainConfig)
    return [
        (title, [(o.name, setting(values[o.name]), o.help) for o in known.values() if o.group == group])
        for group, title in _GROUPS.items()
    ]


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
    """Commands to run next, with IMAGES and DATA to fill in."""
    run, name = shlex.quote(str(facts.folder)), shlex.quote(f"{facts.name}.safetensors")
    go_on = [("Resume training", f"vitrail train --resume {run}")] if facts.stopped else []
    if facts.card is None:
        return go_on
    config = facts.card.config
    spec = formats_of(family(config)).get("timm")
    fits = spec is not None and spec.unsupported(config) is None
    timm = shlex.quote(f"{facts.name}-timm.safetensors")
    return [
        *go_on,
        ("Predict", f"vitrail predict {run} IMAGES"),
        ("Evaluate again" if facts.data else "Evaluate", f"vitrail evaluate {run}{'' if facts.data else ' DATA'}"),
        ("Explain", f"vitrail explain {run} IMAGES"),
        ("Extract features", f"vitrail embed {run} IMAGES --out features.npz"),
        ("Export to ONNX", f"vitrail export {run}"),
        ("Convert to a single file", f"vitrail convert {run} {name}"),
        *([("Convert to timm weights", f"vitrail convert {run} {timm} --to timm")] if fits else []),
        ("Update this report", f"vitrail report {run}"),
    ]


def elsewhere(facts: RunFacts) -> list[tuple[str, str, str]]:
    """Other results of `vitrail evaluate`, on other data or by other methods: data and split, method, results."""
    found = []
    own = f"{facts.data.name}-val" if facts.data is not None else None
    for name, document in facts.run.scores.items():
        if name == own:
            continue
        known = {measure.name: measure for measure in (*facts.task.measures, *Multiclass.measures)}  # of probes, too
        results = [f"{each.title} {each.text(document[key])}" for key, each in known.items() if key in document]
        results += [f"{s['shots']}-shot {percent(sum(s['top1']) / len(s['top1']))}" for s in document.get("shots", ())]
        where = f"{document['data']}, {document['split']}"
        found.append((where, document.get("method", "head"), ", ".join(results)))
    return found
