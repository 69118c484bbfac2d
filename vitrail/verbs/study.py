"""`vitrail study`: the paper's experiments."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.errors import UserError
from vitrail.files import check_writable, locked

if TYPE_CHECKING:
    from vitrail.studies.execute import Outcome


_MOST_SEEDS = 100  # the seed of the runs that choose learning rates is 1,000


def study(
    name: str,
    data: Sequence[str | Path] = (),
    *,
    budget: str | None = None,
    images: int | None = None,
    seeds: int = 3,
    part: str | None = None,
    merge: Sequence[str | Path] = (),
    dry: bool = False,
    out: str | Path | None = None,
    device: str | None = None,
) -> Outcome:
    """Repeat an experiment of the ViT paper at a size that fits this machine.

    The studies are data-size, scaling, shape, positions, pooling, optimiser, resolution, few-shot, transfer, attention,
    attention-pattern and self-supervised. A study is a list of ordinary runs. It leaves study.json, figures and a page
    with each claim of the paper, our measurement with its interval over seeds, and a verdict by a stated rule. Started
    again, it goes on with the run that was not finished; with more --seeds it adds them.

    Args:
        name: the study
        data: data set; transfer and few-shot take further ones to transfer to (default: fashion-mnist)
        budget (TIME): time for all runs: 30m or 2h (default: 1h)
        images: images that a full run sees, instead of --budget
        seeds: number of seeds, over which intervals are taken
        part (I/N): run only this part of the runs, on one of several machines: 2/4
        merge (FOLDER): folders of other parts, whose finished runs are added
        dry: print the runs and the estimated time, and run nothing
        out (FOLDER): folder of the study (default: studies/<name>-<data>)
        device: cpu, cuda, cuda:1 or mps (default: the fastest available)
    """
    from vitrail.config import Duration, TrainConfig, coerce
    from vitrail.progress import log, log_to_console
    from vitrail.studies import find
    from vitrail.studies.execute import Folder, Outcome, carry_out, of_part, prepare
    from vitrail.studies.page import write_result
    from vitrail.studies.rule import LEAST
    from vitrail.studies.study import Result, Results, listed

    log_to_console()
    found = find(name)
    if budget is not None and images is not None:
        raise UserError("--budget and --images both set the length of the runs. Remove one of them.")
    try:
        seconds = Duration(3600) if budget is None else coerce(TrainConfig, "time_budget", budget)
    except UserError as error:
        raise UserError(str(error).replace("time_budget", "budget")) from None
    if not 1 <= seeds <= _MOST_SEEDS:
        raise UserError(f"'seeds' must be from 1 to {_MOST_SEEDS}, but it is {seeds}.")
    share = _part(part)
    sources = [str(source) for source in ([data] if isinstance(data, str | Path) else data)] or ["fashion-mnist"]
    folder = Folder(Path(out) if out is not None else Path("studies") / f"{name}-{Path(sources[0]).stem}")
    claim: AbstractContextManager[list[Path]] = nullcontext([]) if dry else _claimed(folder.path)
    with tempfile.TemporaryDirectory() as scratch, claim as new:
        place = Path(scratch) if dry else folder.path.resolve()
        with _removed_if_refused(new):
            begun = folder.plan is not None
            lab, plan, clock = prepare(
                found, sources, folder, place, budget=seconds, images=images, seeds=seeds, device=device, merge=merge
            )
            jobs = listed(found, lab, folder.scores)
            mine = set(of_part(jobs, share))
            if not any(job.name in mine and not job.tuning for job in jobs):
                runs = sum(not job.tuning for job in jobs)
                raise UserError(f"Part {part} is empty: the study '{name}' has {runs} runs to divide. Use fewer parts.")
        if budget is not None and begun:
            log.info(f"The length of the runs in {folder.path} is fixed: --budget is not used.")
        if seeds < (most := folder.seeds):
            log.warning(f"{folder.path} has runs of {most} seeds, but the result has {seeds}. For all: --seeds {most}")
        elif seeds < LEAST:
            log.info(f"With fewer than {LEAST} seeds there are no intervals: every verdict is 'cannot tell'.")
        if dry:
            scores = {job.name: folder.scores(job) for job in jobs}
            finished = Results(Result(job, known) for job in jobs if (known := scores[job.name]) is not None)
            timed = [
                (job, time)
                for job, time in zip(jobs, clock.seconds(jobs), strict=True)
                if job.name in mine and scores[job.name] is None
            ]
            chosen, times = [job for job, _ in timed], [time for _, time in timed]
            return Outcome(found, folder.path, chosen, times, plan, finished)
        try:
            outcome = carry_out(found, lab, plan, folder, share, device, merge)
        except KeyboardInterrupt:
            log.info("Interrupted. The same command continues the study.")
            raise
        write_result(outcome)
        return outcome


@contextmanager
def _claimed(folder: Path) -> Iterator[list[Path]]:
    """Creates the folder of a study and holds its lock; yields the folders that are new, the study's first."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    check_writable(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, "running the study in", "choose another --out"):
        yield new


@contextmanager
def _removed_if_refused(new: Sequence[Path]) -> Iterator[None]:
    """Removes the new folder of a study, and those above it that are new, if what is enclosed raises UserError."""
    try:
        yield
    except UserError:
        for folder in new[:1]:
            shutil.rmtree(folder, ignore_errors=True)
        for path in new[1:]:
            with suppress(OSError):  # another study has begun there
                path.rmdir()
        raise


def show(outcome: Outcome) -> int:
    """Print the plan, or the claims and verdicts."""
    print(outcome)
    return 0


def _part(part: str | None) -> tuple[int, int]:
    """A part as (number, count): 2/4."""
    if part is None:
        return 1, 1
    match = re.fullmatch(r"(\d+)/(\d+)", part)
    number, count = (int(match[1]), int(match[2])) if match else (0, 0)
    if match is None or not count:
        raise UserError(f"'part' must be a number and a count, as in 2/4, but it is '{part}'.")
    if not 1 <= number <= count:
        raise UserError(f"There is no part {number} of {count}. Give one from 1/{count} to {count}/{count}.")
    return number, count
