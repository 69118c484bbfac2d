"""Training steps and inference of vitrail, timm, transformers and vit-pytorch, side by side on a CPU.

    make bench                               # the first two commands below, in an environment of its own
    python benchmarks/peers.py               # at most 20 minutes; on an otherwise idle machine
    python benchmarks/peers.py draw          # the tables and the figure of docs/speed.md
    python benchmarks/peers.py compiled      # at most 15 minutes more, fewer rows: vitrail against the compiled peers
    python benchmarks/peers.py quick         # at most 3 minutes: fewer rows, timm only, fp32

Every library runs in its own process, with the settings that its users get; `contestants.py` says what it computes. The
processes of a row stay alive and take turns of half a second in random order while the others sleep, so that all see
the same minutes of the machine. A ratio is the median over rounds of the ratio within a round.

Results are written to `benchmarks/results/peers.json`: seconds per step of every variant in every round.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from contestants import (
    LIMIT,
    MODELS,
    PEERS,
    VITRAIL,
    Precision,
    Row,
    Variant,
    default_precision,
    environment,
    serve,
)
from parity import loss_curves
from speed_page import draw

from vitrail.files import write_text

RESULTS = Path(__file__).parent / "results" / "peers.json"

Mode = Literal["eager", "compiled", "quick"]
SECONDS: dict[Mode, float] = {"eager": 19 * 60, "compiled": 14 * 60, "quick": 2.7 * 60}
TURN = 0.5  # seconds
ROUNDS, ENOUGH = 40, 8  # at most; for which time is left after compiling
COMPILING = {"training": 75, "inference": 45}  # seconds to expect; at most twice as long

ROWS = (
    Row("training", "Ti/16, 224 px", 16, 1.6, quick=True),
    Row("training", "192 × 9, patch 4, 32 px", 64, 1.6, quick=True),
    Row("training", "192 × 9, patch 4, 32 px", 256, 2.0),
    Row("inference", "Ti/16, 224 px", 1, 1.0, quick=True),
    Row("inference", "Ti/16, 224 px", 16, 1.0, quick=True),
    Row("inference", "B/16, 224 px", 1, 1.0, quick=True),
    Row("inference", "B/16, 224 px", 16, 1.5),
    Row("training", "B/16, 224 px", 8, 3.3),  # the longest, last: time that others leave is its own
)
CHECKED = ("Ti/16, 224 px", "192 × 9, patch 4, 32 px")  # models whose loss curves are compared


class Lost(Exception):
    """A process that has ended, or did not answer in time."""


class Worker:
    """A process that computes one library's variants of a row."""

    def __init__(self, row: Row, library: str, compiled: bool = False):
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=serve, args=(other, row, library, compiled), daemon=True)
        with _environment(environment(library, compiled)):
            self._process.start()
        other.close()

    def receive(self, timeout: float | None = None) -> Any:
        if not self._pipe.poll(timeout):
            raise Lost(f"no answer within {timeout:.0f} s")
        try:
            return self._pipe.recv()
        except EOFError:
            raise Lost("the process failed") from None

    def ask(self, request: Any, timeout: float | None = None) -> Any:
        self._pipe.send(request)
        return self.receive(timeout)

    def turn(self, variant: Variant, seconds: float = TURN, timeout: float | None = None) -> tuple[float, float]:
        """Seconds per step, and the peak memory of the process so far in MiB, beyond its imports."""
        return self.ask((variant, seconds), timeout)

    def end(self) -> None:
        with suppress(OSError):
            self._pipe.send(None)
        self._process.join(10)
        self._process.terminate()
        self._process.join()


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Environment variables for the processes started inside."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@dataclass
class Measured:
    """One row: every variant's seconds per step in every round."""

    row: Row
    default: str  # the variant of vitrail that its users get
    variants: dict[str, Variant] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)  # MiB, by library, of the first variant
    compiling: dict[str, float] = field(default_factory=dict)  # seconds
    skipped: dict[str, str] = field(default_factory=dict)  # reasons
    profile: dict[str, float] = field(default_factory=dict)


def eager_variants(row: Row, mode: Mode, bf16: bool) -> list[Variant]:
    """The variants that need no compiling, vitrail's default first."""
    default = default_precision()
    precisions: list[Precision] = ["fp32", "bf16"] if bf16 and mode != "quick" else ["fp32"]
    found = [Variant(VITRAIL, default)]
    if mode == "compiled":
        return found
    if row.what == "training" and default == "bf16":
        found.append(Variant(VITRAIL, "fp32"))
    for peer in PEERS[:1] if mode == "quick" else PEERS:
        # Plain AdamW for the first only: what it costs is the same for all, and rounds are worth more.
        both = ("AdamW", "fused AdamW") if peer == PEERS[0] else ("fused AdamW",)
        found += [Variant(peer, p, how) for p in precisions for how in (both if row.what == "training" else ("",))]
    return found + [Variant(LIMIT, p, how) for p in precisions for how in ("F.linear", "oneDNN")]


def compiled_variants(row: Row, mode: Mode, bf16: bool) -> list[Variant]:
    """The variants to compile, most important first."""
    how = "fused AdamW" if row.what == "training" else ""
    precisions: list[Precision] = ["fp32", "bf16"] if bf16 else ["fp32"]
    return [Variant(peer, p, how, compiled=True) for peer in PEERS for p in precisions] if mode == "compiled" else []


Contest = dict[Variant, tuple[Worker, float]]  # each variant's process, and its seconds per step in the first turn


def measure(row: Row, mode: Mode, bf16: bool, end: float, last: float) -> Measured:
    """Measures a row until `end`, and with fewer than three rounds by then, until `last`."""
    variants = eager_variants(row, mode, bf16)
    found = Measured(row, variants[0].name)
    workers = {library: Worker(row, library) for library in dict.fromkeys(v.library for v in variants)}
    contest: Contest = {}
    try:
        for worker in workers.values():
            worker.receive()
        for variant in variants:
            worker = workers[variant.library]
            for _ in range(1 if variant.library in found.memory else 2):  # the first steps are slow
                seconds, memory = worker.turn(variant, 0)
            contest[variant] = worker, seconds
            found.memory.setdefault(variant.library, memory)
            _say(f"  {variant.name}: {seconds:.3f} s per step, {memory:.0f} MiB")
        for variant in compiled_variants(row, mode, bf16):
            rounds = ENOUGH * sum(max(seconds, TURN) for _, seconds in contest.values())
            expected = max(found.compiling.values(), default=COMPILING[row.what])
            if time.monotonic() + expected + rounds > end:
                found.skipped[variant.name] = "no time left to compile"
            elif _free_memory() < 2 * found.memory[VITRAIL]:
                found.skipped[variant.name] = "no memory left to compile"
            else:
                workers[variant.name] = Worker(row, variant.library, compiled=True)
                compile_variant(variant, workers[variant.name], contest, found)
        take_turns(contest, found, end, last)
        if row.what == "training" and mode == "eager":
            found.profile = workers[VITRAIL].ask("profile")
    finally:
        for worker in workers.values():
            worker.end()
    return found


def compile_variant(variant: Variant, worker: Worker, contest: Contest, found: Measured) -> None:
    """Adds a compiled variant to the contest, or the reason why it cannot take part."""
    begun, patience = time.monotonic(), 2 * COMPILING[found.row.what]
    try:
        worker.receive(patience)
        for _ in range(2):  # some models are compiled once more in the second step
            worker.turn(variant, 0, patience)
        found.compiling[variant.name] = seconds = time.monotonic() - begun
        contest[variant] = worker, worker.turn(variant, 0, patience)[0]
        _say(f"  {variant.name}: {contest[variant][1]:.3f} s per step after {seconds:.0f} s of compiling")
    except Lost as lost:
        found.skipped[variant.name] = f"not compiled: {lost}"


def take_turns(contest: Contest, found: Measured, end: float, last: float) -> None:
    """Rounds in which every variant has one turn, in random order."""
    found.variants = {variant.name: variant for variant in contest}
    found.seconds = {variant.name: [] for variant in contest}
    longest = 0.0
    for number in range(ROUNDS):
        begun = time.monotonic()
        if number and begun + longest > (end if number >= 3 else last):
            break
        for variant, (worker, _) in random.sample(list(contest.items()), len(contest)):
            found.seconds[variant.name].append(worker.turn(variant)[0])
        longest = max(longest, time.monotonic() - begun)
    _say(f"  {len(found.seconds[found.default])} rounds")


def run(mode: Mode) -> None:
    from vitrail.device import hardware, has_bf16
    from vitrail.models import macs
    from vitrail.models.vit import ViTConfig

    begun = time.monotonic()
    last = begun + SECONDS[mode]
    bf16 = has_bf16()
    _say(f"{hardware('cpu')}; bf16 {'in hardware' if bf16 else 'without hardware support'}")
    parity = {}
    for model in {"eager": CHECKED, "quick": CHECKED[1:], "compiled": ()}[mode]:
        parity[model] = _elsewhere(loss_curves, MODELS[model])
        _say(f"{model}: losses of 10 steps differ from timm's by {parity[model]['difference']:.1e} at most")
        if parity[model]["difference"] > 1e-4:
            sys.exit("vitrail and timm do not compute the same, so their times cannot be compared.")
    rows = [row for row in ROWS if row.quick or mode == "eager"]
    measured = []
    for number, row in enumerate(rows):
        now, weights = time.monotonic(), [later.weight for later in rows[number:]]
        _say(f"{number + 1}/{len(rows)} {row.what}: {row.name} ({(now - begun) / 60:.1f} min so far)")
        if now > last:
            _say("  left out: the time is over")
            continue
        measured.append(measure(row, mode, bf16, now + (last - now) * row.weight / sum(weights), last))
    minutes = (time.monotonic() - begun) / 60
    found = {"cpu": hardware("cpu"), "minutes": minutes, "rows": [asdict(row) for row in measured]}
    if mode == "compiled":
        document = json.loads(RESULTS.read_text()) | {"compiled": found}
    else:
        document = found | {
            "bf16": bf16,
            "default_precision": default_precision(),
            "quick": mode == "quick",
            "versions": _versions(),
            "parity": parity,
            "macs": {name: macs(ViTConfig(**asdict(shape))) for name, shape in MODELS.items()},
        }
    RESULTS.parent.mkdir(exist_ok=True)
    write_text(RESULTS, json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    _say(f"{RESULTS} written after {minutes:.1f} min")


def _elsewhere(compute: Callable[..., Any], *args: Any) -> Any:
    """The result of a function, computed in another process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(compute, args)


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("vitrail", "torch", *PEERS)}


def _free_memory() -> float:
    """MiB that new processes can use (Linux)."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].removesuffix("kB")) / 1024


def _say(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=[*SECONDS, "draw"], default="eager")
    args = parser.parse_args()
    if args.what == "draw":
        draw(json.loads(RESULTS.read_text()))
    else:
        run(args.what)


if __name__ == "__main__":
    main()
