"""What a study is made of: runs, results, claims and findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from vitrail.charts.kinds import Chart
from vitrail.errors import UserError, shown
from vitrail.studies.rule import Verdict

if TYPE_CHECKING:
    from vitrail.studies.lab import Lab

Label = str | int | float
Scores = dict[str, Any]  # numbers, or lists of numbers
Fair = Literal["images", "compute"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One ordinary run: `vitrail train` or `pretrain` with these settings, then measurements of its model."""

    name: str  # of the run folder
    labels: dict[str, Label]  # what distinguishes it, for tables and charts; "seed" among them
    data: str
    settings: dict[str, Any]
    epochs: float
    method: str = ""  # of `vitrail pretrain`; without one, `vitrail train`
    weights: str | None = None  # name of the run whose model it starts from
    forget: bool = False  # whether the positions of the weights are drawn anew
    probes: tuple[tuple[str, str], ...] = ()  # data sets and methods of `vitrail evaluate`
    look: str = ""  # name of a function in `looks` that measures the model in another way
    tuning: bool = False  # a run that only chooses a setting: every part of a study repeats it
    full: float | None = None  # images that a run of full length sees; None for shorter ones


@dataclass(frozen=True)
class Result:
    """A finished run: its scores by name."""

    job: Job
    scores: Scores


class Results(list[Result]):
    """The results of a list of runs, in order."""

    def __call__(self, score: str = "top1", **labels: Label) -> list[Any]:
        """The scores of the runs with these labels, in order of the list: one per seed."""
        found = [r for r in self if all(r.job.labels.get(name) == value for name, value in labels.items())]
        if not found:
            raise UserError(f"The study asks for the results of runs with {labels}, but it yielded none.")
        return [result.scores[score] for result in found]

    def best(self, score: str, over: str, **labels: Label) -> tuple[Label, list[Any]]:
        """The value of the label `over` with the best mean score, and its scores."""
        values = dict.fromkeys(r.job.labels[over] for r in self if over in r.job.labels)
        means = {v: found for v in values if (found := self._maybe(score, **{**labels, over: v}))}
        best = max(means, key=lambda v: sum(means[v]) / len(means[v]))
        return best, means[best]

    def _maybe(self, score: str, **labels: Label) -> list[Any]:
        return [r.scores[score] for r in self if all(r.job.labels.get(name) == value for name, value in labels.items())]


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, our measurement, and the verdict of `rule`."""

    paper: str
    ours: str
    verdict: Verdict


@dataclass(frozen=True)
class Findings:
    """The outcome of a study."""

    claims: Sequence[Claim]
    charts: Sequence[Chart]
    notes: Sequence[str] = ()


Steps: TypeAlias = Generator[list[Job], Results, Findings]


@dataclass(frozen=True)
class Study:
    """A registered study."""

    name: str
    question: str
    paper: str  # figure, table or section
    fair: Fair  # what all runs that are compared have in common
    run: Callable[[Lab], Steps]
    images: int = 200  # least training images
    classes: int = 2  # least classes
    targets: int = 0  # how many further data sets it takes, to transfer to

    @property
    def about(self) -> str:
        """The docstring."""
        return (self.run.__doc__ or "").strip()


STUDIES: dict[str, Study] = {}


def register(
    name: str,
    *,
    question: str,
    paper: str,
    fair: Fair,
    images: int = 200,
    classes: int = 2,
    targets: int = 0,
) -> Callable[[Callable[[Lab], Steps]], Callable[[Lab], Steps]]:
    """Registers a study under its name; a decorator."""

    def add(run: Callable[[Lab], Steps]) -> Callable[[Lab], Steps]:
        if name in STUDIES and STUDIES[name].run.__module__ != run.__module__:
            raise UserError(f"There already is a study '{name}'. Choose another name.")
        if fair not in get_args(Fair):
            raise UserError(f"'fair' must be {' or '.join(get_args(Fair))}, but it is {shown(fair)}.")
        STUDIES[name] = Study(name, question, paper, fair, run, images, classes, targets)
        return run

    return add


def listed(study: Study, lab: Lab, known: Callable[[Job], Scores | None] = lambda _: None) -> list[Job]:
    """The runs of a study, in order, found by sending it the scores of lists that are known, or made-up ones."""
    jobs: list[Job] = []
    steps = study.run(lab)
    if not isinstance(steps, Generator):
        raise UserError(f"The study '{study.name}' must be a generator function: it yields lists of lab.job(…).")
    try:
        wanted = next(steps)
        while True:
            jobs += wanted
            wanted = steps.send(sendable(Results(Result(job, known(job) or Unknown()) for job in wanted)))
    except StopIteration:
        pass
    if all(job.tuning for job in jobs):
        raise UserError(f"The study '{study.name}' yields no runs.")
    for name, count in Counter(job.name for job in jobs).items():
        if count > 1:
            raise UserError(f"The study '{study.name}' yields the run {name} {count} times. Make their labels differ.")
    return jobs


def sendable(results: Results) -> Results:
    """The results, or only made-up ones if some are missing: both together may have different shapes."""
    if any(isinstance(result.scores, Unknown) for result in results):
        return Results(Result(result.job, Unknown()) for result in results)
    return results


class Unknown(dict[str, Any]):
    """Scores of a run that has not run: every one of them is 0.5."""

    def __missing__(self, name: str) -> Any:
        return [[0.5, 0.5], [0.5, 0.5]] if is_map(name) else 0.5


def is_map(score: str) -> bool:
    """Whether a score is a list of lists of numbers, by its name; others are numbers."""
    return score.startswith("map_")
