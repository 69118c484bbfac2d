"""The page that compares runs: their settings and scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vitrail.charts import build
from vitrail.charts.kinds import Chart
from vitrail.charts.measure import Measure
from vitrail.config import TrainConfig, flat, options
from vitrail.data.dataset import target_bytes
from vitrail.errors import UserError
from vitrail.models import parameters
from vitrail.report import text
from vitrail.report.charts import fit
from vitrail.report.facts import RunFacts
from vitrail.report.page import render
from vitrail.report.tables import Cell, Line, Table
from vitrail.report.text import between, plus_minus, setting
from vitrail.tasks.bootstrap import difference
from vitrail.tasks.task import Headline

_IGNORED = {"name", "out", "fold"}  # settings that differ between any two runs


@dataclass(frozen=True)
class Score:
    """A score of a run, its confidence interval, and its difference from the first run."""

    value: str
    spread: str
    best: bool
    apart: str = ""  # "+1.2, from 0.3 to 2.1"
    matters: bool = False  # the confidence interval of the difference excludes zero


@dataclass(frozen=True)
class Measured:
    """A measure with the scores of all runs."""

    name: str
    meaning: str
    scores: list[Score | None] = field(default_factory=list)


def comparison_page(runs: Sequence[RunFacts], subject: str) -> str:
    """The page that compares runs, which must have the same task; methods of self-supervision may differ."""
    tasks = {facts.card.task.title: facts.card.task for facts in runs if facts.card is not None}
    if len(tasks) > 1 and any(task.labelled for task in tasks.values()):
        raise UserError(
            f"Runs of different tasks cannot be compared: {' and '.join(sorted(tasks))}. Report them separately."
        )
    names = titles(runs)
    return render(
        "comparison.html",
        title=subject,
        subject=subject,
        names=names,
        runs=runs,
        headline=_headline(runs, names),
        notes=[(name, note) for name, facts in zip(names, runs, strict=True) for note in facts.notes],
        paired=_same_images(runs),
        labelled=any(facts.task.labelled for facts in runs),
        measured=measured(runs),
        facts=[dict(text.training(facts)) | _size(facts) for facts in runs],
        differing=differing(runs),
        curves=_curves(runs, names),
        scores=class_scores(runs, names),
    )


def titles(runs: Sequence[RunFacts]) -> list[str]:
    """The names of the runs, made unique by their parent folders or by numbers."""
    names = [facts.name for facts in runs]
    if len(set(names)) < len(names):
        names = [f"{facts.folder.resolve().parent.name}/{facts.name}" for facts in runs]
    return names if len(set(names)) == len(names) else [f"{name} ({i})" for i, name in enumerate(names, 1)]


def _size(facts: RunFacts) -> dict[str, str]:
    return {"parameters": f"{parameters(facts.card.config):,}"} if facts.card is not None else {}


def _headline(runs: Sequence[RunFacts], names: Sequence[str]) -> Headline:
    values = [{} if facts.scores is None else facts.scores.summary() for facts in runs]
    ranking = [measure for facts in runs for measure in facts.task.measures if _ranks(runs, measure)]
    scored = [each for each in values if each]
    main = next((measure for measure in ranking if scored and all(measure.name in each for each in scored)), None)
    if main is None:
        return Headline(f"{len(runs)} runs side by side.", "", "")
    best = main.best([each[main.name] for each in scored])
    number = next(i for i, each in enumerate(values) if each.get(main.name) == best)
    score = f"{main.text(best)}{plus_minus(main, runs[number].samples.interval(main.name))}"
    return Headline(f"Best of {len(runs)} runs: {names[number]} with ", score, f" {main.title}.")


def _ranks(runs: Sequence[RunFacts], measure: Measure) -> bool:
    """Whether a measure tells which run is better: it does so in general, and was measured on the same probe data."""
    probes = {facts.config.run.probe for facts in runs if facts.scores is not None}
    return measure.comparable and len(probes - {None}) <= 1


def _curves(runs: Sequence[RunFacts], names: Sequence[str]) -> list[Chart]:
    rows = {name: facts.rows for name, facts in zip(names, runs, strict=True)}
    task = next((facts.task for facts in runs if facts.rows), None)
    if task is None:
        return []
    if task.labelled:
        return [fit(chart) for chart in build.together(rows, task.measures[0])]
    charts = [build.overlaid(rows, measure) for measure in task.measures]
    return [fit(chart) for chart in charts if chart is not None]


def _same_images(runs: Sequence[RunFacts]) -> bool:
    """Whether all runs were measured on the same images."""
    splits = [facts.data.splits["val"] for facts in runs if facts.data is not None and facts.outputs is not None]
    if len(splits) < len(runs):
        return False
    first = splits[0]
    return all(
        len(split) == len(first)
        and target_bytes(split.targets) == target_bytes(first.targets)
        and all(split.name(i) == first.name(i) for i in range(len(first)))
        for split in splits[1:]
    )


def measured(runs: Sequence[RunFacts]) -> list[Measured]:
    """All measures of every run, with paired differences if they were measured on the same images."""
    paired, table = _same_images(runs), []
    known = [facts for facts in runs if facts.scores is not None]
    for measure in known[0].task.measures if known else ():
        name = measure.name
        values = [facts.scores.summary().get(name) if facts.scores is not None else None for facts in runs]
        there = [value for value in values if value is not None]
        if not there:
            continue
        best = measure.best(there)
        line = Measured(measure.title, measure.meaning)
        for number, (facts, value) in enumerate(zip(runs, values, strict=True)):
            if value is None:
                line.scores.append(None)
                continue
            apart, matters = "", False
            if paired and number and values[0] is not None:
                interval = difference(runs[0].samples, facts.samples, name)
                gap = f"{'+' if value >= values[0] else '−'}{measure.text(abs(value - values[0]))}"
                apart = f"{gap} ({between(measure, interval)})" if interval else gap
                matters = interval is not None and not interval[0] <= 0 <= interval[1]
            spread = plus_minus(measure, facts.samples.interval(name))
            highlighted = value == best and _ranks(runs, measure)
            line.scores.append(Score(measure.text(value), spread, highlighted, apart, matters))
        table.append(line)
    return table


def differing(runs: Sequence[RunFacts]) -> list[tuple[str, str, list[str]]]:
    """The settings that differ between runs: name, help text, value in each run."""
    values = [flat(facts.config) for facts in runs]
    return [
        (option.name, option.help, [setting(value[option.name]) for value in values])
        for option in options(TrainConfig).values()
        if option.name not in _IGNORED and len({repr(value[option.name]) for value in values}) > 1
    ]


def class_scores(runs: Sequence[RunFacts], names: Sequence[str]) -> Table | None:
    """The main score of each class, label or value in every run, and the largest difference."""
    task = next((facts.task for facts in runs if facts.scores is not None), None)
    if task is None or not task.columns:
        return None
    by = next(measure for measure in task.columns if measure.name == task.ranked)
    columns: list[dict[str, float | None]] = [
        {score.name: getattr(score, by.name) for score in facts.scores.each} if facts.scores is not None else {}
        for facts in runs
    ]
    lines = []
    for name in dict.fromkeys(name for column in columns for name in column):
        found = [column.get(name) for column in columns]
        there = [value for value in found if value is not None]
        cells = [
            Cell("–", -1.0) if value is None else Cell(by.text(value), value, min(max(value, 0.0), 1.0))
            for value in found
        ]
        apart = max(there) - min(there) if there else 0.0
        lines.append(Line(name, [*cells, Cell(by.text(apart), apart)]))
    return Table(f"{by.title} of each {task.one}", [task.one, *names, "difference"], lines).lowest()
