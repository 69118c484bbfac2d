"""What a page says in words and numbers: the headline, what was measured, the settings, the commands."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail.config import Duration, TrainConfig, flat, options
from vitrail.data.targets import WORDS
from vitrail.errors import shortlist
from vitrail.evaluate.bootstrap import Interval
from vitrail.evaluate.metrics import AnyMetrics, LabelMetrics, Metrics
from vitrail.models import family, parameters
from vitrail.report.charts import percent, shown
from vitrail.report.facts import Facts
from vitrail.weights.recognise import formats_of

_FAMILIES = {"vit": "ViT"}
_GROUPS = {
    "": "What",
    "source": "Data",
    "input": "Input",
    "arch": "Architecture",
    "transfer": "Trained weights",
    "distillation": "Teacher",
    "optim": "Optimisation",
    "augment": "Augmentation",
    "run": "Run",
}

# What each number is called and, in a few words, what it means.
MEASURES: dict[str, tuple[str, str]] = {
    "top1": ("top-1", "images whose likeliest class is the true one"),
    "top5": ("top-5", "images whose true class is among the five likeliest"),
    "ece": ("calibration error", "mean gap between confidence and accuracy"),
    "map": ("mAP", "average precision, mean over the labels"),
    "macro_f1": ("macro F1", "mean of the labels' F1, each at its threshold"),
    "micro_f1": ("micro F1", "F1 of all answers as one"),
    "r2": ("R²", "share of the variance that is explained"),
    "mae": ("MAE", "mean error, in the units of the data"),
    "rmse": ("RMSE", "root of the mean squared error"),
    "loss": ("loss", "what training makes small"),
}


@dataclass(frozen=True)
class Headline:
    """A sentence whose middle is the result."""

    before: str
    score: str
    after: str


@dataclass(frozen=True)
class Measure:
    """A number, how sure it is, and what it means."""

    name: str
    value: str
    spread: str  # "± 0.5"
    interval: str  # "91.1 to 92.1 %"
    meaning: str


def headline(facts: Facts) -> Headline:
    """What the run came to, in one plain sentence."""
    who, metrics = _who(facts), facts.metrics
    task = facts.card.task if facts.card is not None else facts.data.task if facts.data is not None else "multiclass"
    what = f"{_what(facts, task)}{' apart' if task == 'multiclass' else ''}"
    if metrics is None:
        verb = {"multiclass": "tell", "multilabel": "find", "regression": "measure"}[task]
        return Headline(f"{who} is learning to {verb} {what}.", "", "")
    verb = {"multiclass": "tells", "multilabel": "finds", "regression": "measures"}[task]
    main = main_name(metrics)
    images = f"{metrics.images:,} {facts.split} images"
    score = f"{shown(main, metrics.main)}{plus_minus(main, facts.samples.interval(main))}"
    if task == "multiclass":
        return Headline(f"{who} {verb} {what}: ", score, f" of {images} are right.")
    name = "a mean average precision of " if task == "multilabel" else "an R² of "
    return Headline(f"{who} {verb} {what}: {name}", score, f" on {images}.")


def _who(facts: Facts) -> str:
    model = facts.config.model
    family = _FAMILIES.get(model.split("_")[0], model)
    return f"A {family}" + (f" with {large(parameters(facts.card.config))} parameters" if facts.card else "")


def _what(facts: Facts, task: str) -> str:
    names = facts.card.classes if facts.card is not None else facts.data.classes if facts.data is not None else ()
    data = Path(facts.config.data.removeprefix("hf:")).stem.replace("-", "\u2011")  # no line ends in a name
    if task == "regression":
        return f"{shortlist(names, 3)} in {data}"
    return f"the {len(names):,} {WORDS['multilabel' if task == 'multilabel' else 'multiclass'].many} of {data}"


def measures(facts: Facts) -> list[Measure]:
    """Everything that was measured of the whole, with its interval."""
    if facts.metrics is None:
        return []
    found = []
    summary = facts.metrics.summary()
    for name, (title, meaning) in MEASURES.items():
        if name not in summary or (name == "top5" and len(facts.metrics.per_class) <= 5):  # type: ignore[union-attr]
            continue
        interval = facts.samples.interval(name)
        found.append(
            Measure(title, shown(name, summary[name]), plus_minus(name, interval), between(name, interval), meaning)
        )
    return found


def main_name(metrics: AnyMetrics) -> str:
    return "top1" if isinstance(metrics, Metrics) else "map" if isinstance(metrics, LabelMetrics) else "r2"


def plus_minus(name: str, interval: Interval | None) -> str:
    """Half the width of an interval, as it stands behind a number."""
    if interval is None:
        return ""
    return f" ± {shown(name, (interval[1] - interval[0]) / 2).removesuffix('%').rstrip()}"


def between(name: str, interval: Interval | None) -> str:
    if interval is None:
        return ""
    low, high = (shown(name, end).replace("-", "−") for end in interval)
    return f"{low.removesuffix('%').rstrip()} to {high}"


def large(number: int) -> str:
    """A large number in words: 816 thousand, 5.5 million."""
    for size, word in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if number >= size:
            return f"{number / size:.3g} {word}"
    return str(number)


def leads(facts: Facts) -> dict[str, str]:
    """What the worst and the best predictions are, by the task."""
    if isinstance(facts.metrics, Metrics):
        return {"worst": "Wrong, and surest of it.", "best": "Right and surest, of every class in turn."}
    if isinstance(facts.metrics, LabelMetrics):
        return {"worst": "Images with the highest loss over all labels.", "best": "Images with the lowest loss."}
    return {"worst": "Images with the largest error.", "best": "Images with the smallest error."}


def training(facts: Facts) -> list[tuple[str, str]]:
    """How training went: time, speed, the machine and the programs."""
    optim, rows = facts.config.optim, facts.rows
    made_with = dict(facts.card.versions) if facts.card is not None else {}
    found = []
    if rows:
        seconds, images = rows[-1]["seconds"], rows[-1]["step"] * optim.batch_size * optim.grad_accum_steps
        epochs = f"{len(rows)} of {optim.epochs:g}" if facts.stopped else f"{len(rows)}"
        found = [
            ("epochs", epochs),
            ("steps", f"{rows[-1]['step']:,.0f} of {optim.batch_size * optim.grad_accum_steps} images"),
            ("time", str(Duration(seconds))),
            ("throughput", f"{images / max(seconds, 1e-9):,.0f} images a second, validation included"),
        ]
        if "wait" in rows[0]:  # older runs do not say it
            found.append(("waiting for data", percent(sum(row["wait"] for row in rows) / len(rows), 0)))
    if facts.card is not None and (teacher := facts.card.teacher):
        name, score = next((name, teacher["metrics"][name]) for name in MEASURES if name in teacher["metrics"])
        found.append(("teacher", f"{teacher['model']}, {MEASURES[name][0]} {shown(name, score)}"))
    found.append(("hardware", made_with.pop("hardware", "not recorded")))
    precision = "32-bit" if facts.config.run.amp == "off" else facts.config.run.amp
    found.append(
        ("device", f"{facts.config.run.device}, {precision}{', compiled' if facts.config.run.compile else ''}")
    )
    return found + [(name, version) for name, version in made_with.items()]


def settings(config: TrainConfig) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Every setting by group: name, value, what it is."""
    values, known = flat(config), options(TrainConfig)
    return [
        (title, [(o.name, setting(values[o.name]), o.help) for o in known.values() if o.group == group])
        for group, title in _GROUPS.items()
    ]


def setting(value: object) -> str:
    """The value of a setting as a person would type it."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        whole = len(value) == 2 and all(isinstance(part, int) for part in value)
        return ("×" if whole else ", ").join(map(setting, value))
    return f"{value:g}" if type(value) is float else str(value)


def commands(facts: Facts) -> list[tuple[str, str]]:
    """What to type next: each line works as it stands, but for IMAGES and DATA."""
    run, name = shlex.quote(str(facts.folder)), shlex.quote(f"{facts.name}.safetensors")
    go_on = [("Go on with the training", f"vitrail train --resume {run}")] if facts.stopped else []
    if facts.card is None:
        return go_on
    config = facts.card.config
    spec = formats_of(family(config)).get("timm")
    fits = spec is not None and spec.unsupported(config) is None
    timm = shlex.quote(f"{facts.name}-timm.safetensors")
    return [
        *go_on,
        ("Predict", f"vitrail predict {run} IMAGES"),
        ("Measure it again" if facts.data else "Measure it", f"vitrail evaluate {run}{'' if facts.data else ' DATA'}"),
        ("See what it sees", f"vitrail explain {run} IMAGES"),
        ("Feature vectors", f"vitrail embed {run} IMAGES --out features.npz"),
        ("As ONNX, for other programs", f"vitrail export {run}"),
        ("As one file to give away", f"vitrail convert {run} {name}"),
        *([("As weights for timm", f"vitrail convert {run} {timm} --to timm")] if fits else []),
        ("Make this page again", f"vitrail report {run}"),
    ]


def elsewhere(facts: Facts) -> list[tuple[str, str, str]]:
    """What `vitrail evaluate` measured beside the run's own validation images: data and split, method, results."""
    found = []
    own = f"{facts.data.name}-val" if facts.data is not None else None
    for file in sorted(facts.folder.glob("evaluation/*/metrics.json")):
        if file.parent.name == own:
            continue
        document: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        results = [f"{MEASURES[key][0]} {shown(key, document[key])}" for key in MEASURES if key in document]
        results += [f"{s['shots']}-shot {percent(sum(s['top1']) / len(s['top1']))}" for s in document.get("shots", ())]
        where = f"{document['data']}, {document['split']}"
        found.append((where, document.get("method", "head"), ", ".join(results)))
    return found
