"""Carries out a study in a folder: plans, runs what is not finished, and writes the result.

| file or folder   | content                                                                               |
|------------------|---------------------------------------------------------------------------------------|
| `plan.json`      | what determines the runs: study, data and its identity, length of a full run            |
| `data/`          | the data sets of the runs                                                               |
| `runs/`          | the runs, as `vitrail train` and `pretrain` leave them                                  |
| `records/`       | the scores of each finished run                                                         |
| `study.json`     | all scores, claims and verdicts; no times, so that it depends on the runs alone         |
| `*.png`, `study.html` | the figures, and the page                                                          |
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.config import Duration
from vitrail.data.identity import differences, identity
from vitrail.device import choose_device
from vitrail.errors import UserError, shown
from vitrail.files import read_json, read_text, reading, write_text
from vitrail.progress import log
from vitrail.runs.run import Run
from vitrail.studies.cost import Clock, check_jobs, fitting, least_images
from vitrail.studies.lab import TUNING_SEED, Lab
from vitrail.studies.measure import measured
from vitrail.studies.sets import check_size, cut
from vitrail.studies.study import Findings, Job, Result, Results, Scores, Study, Unknown, is_map, listed, sendable
from vitrail.train.divergence import Diverged
from vitrail.train.start import start, start_pretraining

_ADVICE = "Delete it: the run is measured again, not trained again."
_MOST = 2**40  # images of a full run
BATCHES = (32, 64, 128)  # the largest with which a full run has enough steps
_STEPS = 1500
_FEW_STEPS = 500  # fewer than these are too few to learn much
# What a plan has, by type. Those of earlier versions have no identity of the data.
_PLAN = {"study": str, "data": str, "targets": list, "images": int, "batch": int, "unit": float, "fair": str}


@dataclass(frozen=True)
class Outcome:
    """A study that was carried out, wholly or in part."""

    study: Study
    folder: Path
    jobs: list[Job]
    seconds: list[float] | None  # estimated, of the runs of a plan
    plan: dict[str, Any]
    results: Results
    findings: Findings | None = None  # None while runs are missing

    def __str__(self) -> str:
        from vitrail.studies.page import listing, text

        return text(self) if self.seconds is None else listing(self)


class Folder:
    """The folder of a study."""

    def __init__(self, path: Path):
        self.path = path

    @property
    def plan(self) -> dict[str, Any] | None:
        file = self.path / "plan.json"
        plan = read_json(file) if file.exists() else None
        if plan is not None and not (
            isinstance(plan, dict)
            and all(type(plan.get(name)) is kind for name, kind in _PLAN.items())
            and all(1 <= plan[name] <= _MOST for name in ("images", "batch"))
            and 0 < plan["unit"] < np.inf
        ):
            raise UserError(f"{file} is not the plan of a study. Choose another --out.")
        return plan

    def changes(self, before: dict[str, Any], now: dict[str, Any]) -> list[str]:
        """How the data of this folder's plan and another's differ; empty if that is not known."""
        old, new = before.get("identity"), now.get("identity")
        if old is None or new is None:
            return []
        with reading(self.path / "plan.json", "the plan of a study", "Choose another --out."):
            return [what for each in zip(old, new, strict=True) for what in differences(*each)]

    @property
    def seeds(self) -> int:
        """The number of seeds of the finished runs."""
        records = sorted((self.path / "records").glob("*.json"))
        found = set()
        for file in records:
            with reading(file, "a record of scores", _ADVICE):
                found.add(int(json.loads(read_text(file))["labels"]["seed"]))
        return len(found - {TUNING_SEED})

    def save_plan(self, plan: dict[str, Any]) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        write_text(self.path / "plan.json", json.dumps(plan, indent=2) + "\n")

    def scores(self, job: Job) -> Scores | None:
        file = self.path / "records" / f"{job.name}.json"
        if not file.exists():
            return None
        with reading(file, "a record of scores", _ADVICE):
            scores = json.loads(read_text(file))["scores"]
            for name, value in scores.items():
                numbers = np.asarray(value)
                if numbers.dtype.kind not in "if" or numbers.ndim != 2 * is_map(name) or not numbers.size:
                    raise ValueError(f"its {name} is {shown(value)}")
            return Record(file, scores)

    def record(self, job: Job, scores: Scores) -> None:
        folder = self.path / "records"
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"labels": job.labels, "scores": scores}, indent=1)
        write_text(folder / f"{job.name}.json", text + "\n")

    def run(self, name: str) -> Path:
        return self.path / "runs" / name

    def agreed(self, others: Sequence[str | Path]) -> dict[str, Any] | None:
        """The plan of this folder and of others, which must have the same; None if there is none."""
        ours = self.plan
        for other in map(Path, others):
            theirs = Folder(other).plan
            if theirs is None:
                raise UserError(f"{other} is not the folder of a study: it has no plan.json.")
            ours = theirs if ours is None else ours
            different = [
                f"has the {name} {theirs[name]}, not {ours[name]}" for name in _PLAN if theirs[name] != ours[name]
            ] or [f"has data that differs in {what}" for what in Folder(other).changes(theirs, ours)]
            if different:
                raise UserError(f"{other} {different[0]}. Merge parts that have the same study, data and --images.")
        return ours

    def merge(self, others: Sequence[str | Path]) -> None:
        """Adds the finished runs of other folders, whose plan is agreed."""
        target = self.path / "records"
        target.mkdir(parents=True, exist_ok=True)
        for file in (file for other in others for file in sorted((Path(other) / "records").glob("*.json"))):
            if not (target / file.name).exists():
                with reading(file, "a record of scores"):
                    write_text(target / file.name, read_text(file))


class Record(dict[str, Any]):
    """The scores in a file."""

    def __init__(self, file: Path, scores: Scores):
        super().__init__(scores)
        self._file = file

    def __missing__(self, name: str) -> Any:
        raise UserError(f"{self._file} has no score '{name}'. {_ADVICE}")


def prepare(
    study: Study,
    data: Sequence[str],
    folder: Folder,
    scratch: Path,
    *,
    budget: float,
    images: int | None,
    seeds: int,
    device: str | None,
    merge: Sequence[str | Path] = (),
) -> tuple[Lab, dict[str, Any], Clock]:
    """The laboratory of a study, from its plan or that of folders to merge if there is one, else within a budget."""
    if len(data) > 1 + study.targets:
        most = "one data set" if not study.targets else f"at most {1 + study.targets} data sets"
        raise UserError(f"The study '{study.name}' takes {most}, but {len(data)} were given.")
    if twice := [source for source, times in Counter(data).items() if times > 1]:
        raise UserError(f"{twice[0]} was given more than once. Remove the others.")
    first, *others = [cut(source, scratch / "data") for source in data]
    check_size(first, study.name, study.images, study.classes)
    plan = folder.agreed(merge)
    clock = Clock(device)
    about = {"study": study.name, "data": first.data.name, "targets": [each.data.name for each in others]}
    own = {"identity": [identity(each.data) for each in (first, *others)]}
    lab = Lab(first, images or 0, seeds, BATCHES[0], study.fair, 0.0, tuple(others))
    unit = float(lab.macs(lab.vit()))
    lab = replace(lab, unit=unit)
    if plan is not None:
        owner, advice = folder.path, "choose another --out"
        if folder.plan is None:
            owner, advice = Path(merge[0]), "merge parts of the same study"
        for name, value in about.items():
            if plan[name] != value:
                raise UserError(f"{owner} has the {name} {plan[name]}, not {value}. {advice.capitalize()}.")
        if changed := folder.changes(plan, own):
            raise UserError(
                f"The data has changed since {owner} was started: {', '.join(changed)}. Restore it, or {advice}."
            )
        if images is not None and images != plan["images"]:
            raise UserError(
                f"The length of the runs in {owner} is {plan['images']:,} images, not {images:,}. Remove --images, or "
                f"{advice}."
            )
        return replace(lab, images=plan["images"], batch=plan["batch"]), plan, clock
    if images is not None and not BATCHES[0] <= images <= _MOST:
        raise UserError(f"'images' must be at least a batch of {BATCHES[0]} and at most {_MOST:,}, but it is {images}.")
    length = images or _fitting(study, lab, budget, clock)
    lab = replace(lab, images=length)
    seen = sorted(job.full for job in listed(study, lab) if job.full is not None) or [float(length)]
    batch = max(batch for batch in BATCHES if batch == BATCHES[0] or seen[0] >= _STEPS * batch)
    lab = replace(lab, batch=batch)
    number, steps = (_span(seen[0] // each, seen[-1] // each) for each in (1, batch))
    log.info(f"A full run sees {number} images, in batches of {batch}: {steps} steps.")
    if seen[0] // batch < _FEW_STEPS:
        log.warning(
            f"Runs of fewer than {_FEW_STEPS} steps are short: learning rates and verdicts may change with a larger "
            "--budget, or more --images."
        )
    return lab, {**about, **own, "images": lab.images, "batch": lab.batch, "unit": unit, "fair": study.fair}, clock


def _span(least: float, most: float) -> str:
    """A range of counts as text: "324 to 3,903"."""
    return f"{least:,.0f}" if least == most else f"{least:,.0f} to {most:,.0f}"


def _fitting(study: Study, lab: Lab, budget: float, clock: Clock) -> int:
    """The images of a full run with which all runs fit a budget."""
    least = least_images(lab.batch)

    def total(length: int) -> float:
        return sum(clock.seconds(listed(study, replace(lab, images=length))))

    return fitting(budget, least, total, study.name, len(listed(study, replace(lab, images=least))))


def carry_out(
    study: Study,
    lab: Lab,
    plan: dict[str, Any],
    folder: Folder,
    part: tuple[int, int],
    device: str | None,
    merge: Sequence[str | Path] = (),
) -> Outcome:
    """Runs what is not finished of a part of a study, here or in folders to merge.

    The findings are returned if nothing is missing.
    """
    check_jobs(listed(study, lab), device)
    folder.save_plan(plan)
    folder.merge(merge)
    begun, done, results, missing = time.monotonic(), 0, Results(), 0
    steps = study.run(lab)
    try:
        wanted = next(steps)
        while True:
            jobs = listed(study, lab, folder.scores)  # the choice of learning rates may have added some
            mine = of_part(jobs, part)
            left = sum(folder.scores(job) is None for job in jobs if job.name in mine)
            found = Results()
            for job in wanted:
                scores = folder.scores(job)
                if scores is None and job.name in mine:
                    done += 1
                    _announce(job, mine.index(job.name) + 1, len(mine), left, begun, done)
                    left -= 1
                    try:
                        scores = perform(job, folder, device)
                    except Diverged:
                        if not job.tuning:
                            raise
                        scores = {"held_out": 0.0}  # the learning rate is too high
                    folder.record(job, scores)
                missing += scores is None
                found.append(Result(job, Unknown() if scores is None else scores))
            results += found
            wanted = steps.send(sendable(found))
    except StopIteration as stop:
        findings = None if missing else stop.value
        complete = Results(result for result in results if not isinstance(result.scores, Unknown))
        return Outcome(study, folder.path, [result.job for result in results], None, plan, complete, findings)


def of_part(jobs: Sequence[Job], part: tuple[int, int]) -> list[str]:
    """The names of the runs of a part, `number` of `count`. Runs that choose settings are in every part.

    A run is in the part of the run whose weights it starts from. Further seeds change nothing for the others. A run
    that is long in every seed is in another part for each.
    """
    number, count = part
    origins = {job.name: job.weights for job in jobs if not job.tuning}

    def root(name: str) -> str:
        origin = origins.get(name)
        return root(origin) if origin in origins else name

    seeds = {job.name: int(job.labels["seed"]) for job in jobs if not job.tuning}
    roots = sorted(dict.fromkeys(map(root, origins)), key=lambda name: seeds[name])
    each = sum(seeds[name] == seeds[roots[0]] for name in roots)  # roots of a seed
    parts = {name: (place + (seeds[name] if each % count == 0 else 0)) % count + 1 for place, name in enumerate(roots)}
    return [job.name for job in jobs if job.tuning or parts[root(job.name)] == number]


def perform(job: Job, folder: Folder, device: str | None) -> Scores:
    """Trains or resumes a run and measures it."""
    path = folder.run(job.name)
    settings: dict[str, Any] = {**job.settings, "epochs": job.epochs, "name": job.name, "out": str(path.parent)}
    if device is not None:
        settings["device"] = device
    if job.weights is not None:
        origin = folder.run(job.weights)
        settings["weights"] = str(forgetful(origin) if job.forget else origin)
    source, resume = (None, str(path)) if Run(path).exists else (job.data, None)
    asked = {} if resume else settings
    with _quiet():
        if job.method:
            start_pretraining(source, resume, False, job.method if source else None, asked)
        else:
            start(source, resume, False, False, asked)
        return measured(job, path, choose_device(device))


def forgetful(run: Path) -> Path:
    """A copy of a run's weights with new position embeddings."""
    import torch

    from vitrail.weights import open_run, save

    path = run / "forgetful" / "model.safetensors"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        model, card = open_run(run)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for positions, _ in model.position_embeddings():
                positions.copy_(0.02 * torch.randn(positions.shape, generator=generator))
        save(path, model, card)
    return path


def _announce(job: Job, number: int, runs: int, unfinished: int, begun: float, done: int) -> None:
    labels = ", ".join(f"{name} {value}" for name, value in job.labels.items())
    spent = time.monotonic() - begun
    left = f" (about {Duration(spent / (done - 1) * unfinished)} left)" if done > 1 else ""
    log.info(f"Run {number} of {runs}{left}: {labels}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Shows only warnings of a run on the console; its own log has everything."""
    handlers = [(handler, handler.level) for handler in log.handlers]
    for handler, _ in handlers:
        handler.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for handler, level in handlers:
            handler.setLevel(level)
