"""Seeded fuzzing: damaged files of every format, and random command lines from the real flags.

`make fuzz` runs for ten minutes and prints how many cases were tried and which failed. A case fails on a traceback, on
more than ten seconds of computing (a command line: a minute) or a minute of waiting, and on a gigabyte of memory beyond
that of honest files.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from faults.commands import command_lines
from faults.mutate import copy, mutate
from faults.readers import Reader, formats
from forks import Case, Forks, hangs

BATCH = 40  # files that one process reads
SECONDS, WAIT = 10, 60  # of computing, of waiting, per case
APART = 10**6  # between the seeds of two processes
HONEST = -1  # the seed of files that are not damaged
MEMORY = 2**30  # bytes beyond the server's
ROOM = 6 * 2**30  # bytes of address space


@dataclass(frozen=True)
class Failure:
    """A case that failed, by its seed, and how."""

    seed: int
    what: str
    why: str


def damaged(reader: Reader, folder: Path, seed: int) -> Path:
    """A copy of honest files, one or two of them damaged by this seed."""
    rng = random.Random(seed)
    target = folder / reader.source.name
    copy(reader.source, target)
    found = sorted(path for pattern in reader.damaged for path in target.glob(pattern)) if reader.damaged else [target]
    files = [path for path in found if path.is_file()]
    for file in [] if seed == HONEST else rng.sample(files, min(len(files), rng.choice((1, 1, 1, 2)))):
        mutate(file, rng)
    return target


def read_batch(formats: dict[str, Reader], cases: list[tuple[int, str]], work: Path) -> list[Failure]:
    """Reads a batch in a forked process. If that dies or takes too much, each case is read in a process of its own."""
    found = _read(formats, cases, work)
    if found is not None:
        return found
    if len(cases) > 1:
        return [failure for case in cases for failure in read_batch(formats, [case], work)]
    return [Failure(*cases[0], "hung, crashed, or took too much memory")]


def _read(formats: dict[str, Reader], cases: list[tuple[int, str]], work: Path) -> list[Failure] | None:
    notes, here = work / "notes", work / "files"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    shutil.rmtree(here, ignore_errors=True)
    pid = os.fork()
    if pid == 0:
        try:
            _child(formats, cases, here, notes)
        finally:
            os._exit(1)
    if hangs(pid, WAIT if len(cases) == 1 else 3 * WAIT):
        os.kill(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    if status or (usage.ru_maxrss - before) * 1024 > MEMORY:
        return None
    lines = [line.split("\x01") for line in notes.read_text(errors="replace").split("\x02") if line]
    return [Failure(int(seed), what, why) for seed, what, why in lines]


def _child(formats: dict[str, Reader], cases: list[tuple[int, str]], here: Path, notes: Path) -> None:
    from vitrail.data.pixels import UnreadableImage
    from vitrail.errors import UserError
    from vitrail.serve.errors import ApiError

    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, size + ROOM))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    found = []
    for seed, name in cases:
        used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        resource.setrlimit(resource.RLIMIT_CPU, (int(used) + SECONDS + 1, resource.RLIM_INFINITY))
        folder = here / f"{seed} {name}"
        folder.mkdir(parents=True)
        os.environ["VITRAIL_CACHE"] = str(folder / "cache")
        try:
            formats[name].read(damaged(formats[name], folder, seed))
        except (UserError, UnreadableImage, ApiError) as error:
            if seed == HONEST:
                found.append((seed, name, str(error)))
            if len(str(error)) > 4000:
                found.append((seed, name, f"a message of {len(str(error)):,} characters"))
        except Exception:
            found.append((seed, name, traceback.format_exc()[-1200:]))
        shutil.rmtree(folder, ignore_errors=True)
    notes.write_text("\x02".join("\x01".join(map(str, each)) for each in found), errors="replace")
    os._exit(0)


def fuzz_files(seed: int, home: Path, only: str = "") -> Iterator[tuple[int, list[Failure]]]:
    """Yields for each batch the number of cases and the failures, without end."""
    known = {name: reader for name, reader in formats(home / "honest").items() if only in name}
    names, work = list(known), home / "work"
    work.mkdir()
    if failures := read_batch(known, [(HONEST, name) for name in names], work):
        raise RuntimeError(f"honest files cannot be read: {failures}")
    while True:
        cases = [(number, names[number % len(names)]) for number in range(seed, seed + BATCH)]
        yield len(cases), read_batch(known, cases, work)
        seed += BATCH


def fuzz_commands(seed: int, home: Path) -> Iterator[tuple[int, list[Failure]]]:
    """Yields for each command line its failures, without end. They write to a copy of the honest files."""
    honest = Path(shutil.copytree(home / "honest", home / "commands"))
    with Forks() as forks:
        for number, words in command_lines(seed, honest):
            before = {path.name for path in honest.iterdir()}
            environment = {"VITRAIL_CACHE": str(home / "cache")}
            answer = forks(Case(words, str(honest), seconds=WAIT, environment=environment))
            why = answer.trouble()
            if not why and answer.peak > MEMORY:
                why = f"{answer.peak / 2**30:.1f} GiB"
            new = {path.name for path in honest.iterdir()} - before
            if not why and answer.code == 2 and new:
                why = f"it was refused, but left {', '.join(sorted(new))}: {answer.sentence}"
            for name in new:
                path = honest / name
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            yield 1, [Failure(number, "vitrail " + " ".join(words), why)] if why else []


def build(home: Path, whole: bool = True) -> None:
    """Honest files, written by a process of its own: threads of its libraries would not survive a fork."""
    (home / "honest").mkdir()
    environment = {**os.environ, "VITRAIL_CACHE": str(home / "cache")}
    program = Path(__file__).with_name("honest.py")
    command = [sys.executable, program, home / "honest", "whole" if whole else "some"]
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)


def fuzz(home: Path, seed: int, seconds: float, only: str) -> tuple[Counter[str], int]:
    """Tries files and command lines for a time; prints failures; returns the numbers of cases and of failures.

    Each process has honest files of its own: caches know where files are.
    """
    end = time.monotonic() + seconds
    home.mkdir()
    build(home)
    tried, failures = Counter[str](), 0
    sources = {"files": fuzz_files(seed, home, only)}
    if not only:
        sources["commands"] = fuzz_commands(seed, home)
    while not tried or time.monotonic() < end:
        for kind, source in sources.items():
            count, found = next(source)
            tried[kind] += count
            failures += len(found)
            for failure in found:
                print(f"\nFAILED seed {failure.seed}: {failure.what}\n{failure.why}", flush=True)
    return tried, failures


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="formats whose name contains this, and no commands")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        homes = [Path(folder) / str(number) for number in range(given.processes)]
        with ProcessPoolExecutor(given.processes, get_context("spawn")) as pool:
            seeds = [given.seed + number * APART for number in range(given.processes)]
            results = pool.map(fuzz, homes, seeds, repeat(given.seconds), repeat(given.only))
            tried, failures = Counter[str](), 0
            for counts, failed in results:
                tried += counts
                failures += failed
    print(f"{tried['files']:,} files and {tried['commands']:,} command lines: {failures} failures.")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
