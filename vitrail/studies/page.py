"""The result of a study: JSON, figures, text and the HTML page."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from vitrail.charts.draw import save_charts
from vitrail.charts.measure import count
from vitrail.config import Duration
from vitrail.files import atomic_write, write_text
from vitrail.report.page import render
from vitrail.studies.execute import Outcome
from vitrail.studies.study import Scores

_FAIR = {
    "images": "every run sees the same number of images",
    "compute": "every run has the same compute, in multiply-accumulates",
}
_LENGTH = {
    "images": "; a full run sees {:,} images",
    "compute": ": that of {:,} images for a ViT of width 64 and depth 4",
}
RULE = (
    "A claim of a difference agrees if the 95 % interval over seeds (Student's, paired by seed) lies wholly on the "
    "claim's side, and disagrees if it lies on the other. A claim of equality agrees if the interval lies within the "
    "stated margin, and disagrees if it lies outside. In all other cases, and always with fewer than three seeds, the "
    "verdict is: cannot tell."
)


def write_result(outcome: Outcome) -> None:
    """Writes study.json; with findings also the figures and the page."""
    write_text(outcome.folder / "study.json", json.dumps(to_json(outcome), indent=1, ensure_ascii=False) + "\n")
    if outcome.findings is not None:
        save_charts(outcome.findings.charts, outcome.folder)
        page = render("study.html", **_content(outcome))
        with atomic_write(outcome.folder / "study.html") as temporary:
            temporary.write_bytes(page.encode("utf-8", "backslashreplace"))


def to_json(outcome: Outcome) -> dict[str, Any]:
    """The result in JSON types. Times and paths are left out: it depends on the runs alone."""
    findings = outcome.findings
    return {
        **outcome.plan,
        "question": outcome.study.question,
        "paper": outcome.study.paper,
        "seeds": _seeds(outcome),
        "runs": len(outcome.jobs),
        "finished": len(outcome.results),
        "claims": [] if findings is None else [vars(claim) for claim in findings.claims],
        "notes": [] if findings is None else list(findings.notes),
        "results": [
            {"run": result.job.name, **result.job.labels, "epochs": result.job.epochs, "scores": result.scores}
            for result in outcome.results
        ],
        "charts": [] if findings is None else [{"title": chart.title, **chart.to_json()} for chart in findings.charts],
    }


def command(result: Mapping[str, Any]) -> str:
    """The command that repeats a study, from its result in JSON types."""
    data = [result["data"], *result["targets"]]
    length = ["--images", str(result["images"]), "--seeds", str(result["seeds"])]
    return shlex.join(["vitrail", "study", result["study"], *data, *length])


def text(outcome: Outcome) -> str:
    """The findings as text, or what is missing."""
    findings, study = outcome.findings, outcome.study
    if findings is None:
        missing = len(outcome.jobs) - len(outcome.results)
        whole = command(outcome.plan | {"seeds": len({job.labels["seed"] for job in outcome.jobs if not job.tuning})})
        return (
            f"{len(outcome.results)} of {len(outcome.jobs)} runs are finished; {missing} are in other parts. When they "
            f"are, merge their folders: {whole} --out {shlex.quote(str(outcome.folder))} --merge FOLDER"
        )
    lines = [f"{study.name} ({study.paper} of the paper): {study.question}", ""]
    for claim in findings.claims:
        lines += [f"claim       {claim.paper}", f"measured    {claim.ours}", f"verdict     {claim.verdict}", ""]
    lines += [*findings.notes, *([""] if findings.notes else [])]
    return "\n".join([*lines, f"The figures, the page study.html and study.json are in {outcome.folder}."])


def listing(outcome: Outcome) -> str:
    """The plan of a study as text: the runs that are not finished, grouped, with their times."""
    groups: dict[str, list[float]] = {}
    assert outcome.seconds is not None
    for job, seconds in zip(outcome.jobs, outcome.seconds, strict=True):
        labels = ", ".join(f"{name} {value}" for name, value in job.labels.items() if name != "seed")
        groups.setdefault(f"{'choosing: ' if job.tuning else ''}{labels}", []).append(seconds)
    width = max(map(len, groups), default=0) + 2
    lines = [
        f"{name:<{width}}{len(times):>3} x {Duration(max(sum(times) / len(times), 1))}"
        for name, times in groups.items()
    ]
    total, plan = sum(outcome.seconds), outcome.plan
    finished = f"; {len(outcome.results)} are finished" if outcome.results else ""
    return "\n".join(
        [
            f"{outcome.study.name} ({outcome.study.paper} of the paper) on {plan['data']}: {outcome.study.question}",
            f"Budget: {_FAIR[outcome.study.fair]}{_LENGTH[outcome.study.fair].format(plan['images'])}.",
            "",
            *lines,
            *([""] if lines else []),
            f"{count(len(outcome.jobs), 'run')}, about {Duration(max(total, 1))} on this machine{finished}.",
            *([f"On another machine, with a part of them: --images {plan['images']} --part 1/2"] if lines else []),
        ]
    )


def _content(outcome: Outcome) -> dict[str, Any]:
    findings, study = outcome.findings, outcome.study
    assert findings is not None
    known = list(dict.fromkeys(name for result in outcome.results for name in result.job.labels))
    shown = list(dict.fromkeys(n for result in outcome.results for n in result.scores if _is_number(result.scores, n)))
    verdicts = [claim.verdict for claim in findings.claims]
    return {
        "title": f"{study.name} on {outcome.plan['data']}",
        "subject": f"study {study.name}",
        "study": study,
        "plan": outcome.plan,
        "fair": _FAIR[study.fair],
        "rule": RULE,
        "paragraphs": [" ".join(part.split()) for part in study.about.split("\n\n")],
        "claims": findings.claims,
        "notes": findings.notes,
        "verdicts": ", ".join(f"{verdict} {times}" for verdict, times in Counter(sorted(verdicts)).items()),
        "charts": findings.charts,
        "labels": known,
        "scores": shown,
        "rows": [
            (
                [_cell(result.job.labels.get(name)) for name in known],
                [_cell(result.scores.get(name)) for name in shown],
            )
            for result in outcome.results
        ],
        "command": command(outcome.plan | {"seeds": _seeds(outcome)}),
    }


def _seeds(outcome: Outcome) -> int:
    return len({result.job.labels["seed"] for result in outcome.results if not result.job.tuning})


def _is_number(scores: Scores, name: str) -> bool:
    return not isinstance(scores[name], list)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float | np.floating) else str(value)
