"""Chooses the fastest safe engine for a model on this CPU: by a short speed test, whose result is cached.

The cache is `engines.json` in the cache folder, by CPU, threads, versions, architecture and batch size. Safety depends
on the weights, so it is checked each time an engine is chosen, and on batches of different sizes.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.data.download import cache_folder
from vitrail.device import hardware
from vitrail.errors import UserError
from vitrail.files import read_text, write_text
from vitrail.progress import log
from vitrail.runs import EngineName
from vitrail.runs.engine import PROGRAMS, Compute
from vitrail.tasks import Task

_PATIENCE = 10.0  # seconds of a job before a speed test, which takes about as long
_GAIN = 1.03  # below this, PyTorch stays
_SECONDS = 1.0  # PyTorch's time for the images of the test, because a whole batch may take much longer
_ROUNDS = 3  # at least; small models get more


@dataclass(frozen=True)
class Result:
    """The result of a speed test."""

    engine: EngineName
    speed: float  # relative to PyTorch
    cost: float  # seconds to make the engine


def patience(about: str, images: Tensor) -> float:
    """Seconds of a job after which `choose` pays."""
    known = _recall(_key(about, images))
    return _PATIENCE if known is None else known.cost


def choose(module: nn.Module, about: str, images: Tensor, task: Task | None) -> tuple[EngineName, Compute]:
    """The fastest engine whose answers agree with PyTorch's on these images; `about` describes what it computes."""
    key = _key(about, images)
    known = _recall(key)
    if known is not None and known.engine == "torch":
        return "torch", module
    few = _few(module, images)
    if known is not None:
        compute = _made(known.engine, module, few, task)
        if compute is None:
            return "torch", module
        log.info(f"Engine: {PROGRAMS[known.engine].title}, {known.speed:.2f}× PyTorch (measured earlier).")
        return known.engine, compute
    programs: dict[EngineName, Compute] = {"torch": module}
    costs: dict[EngineName, float] = {"torch": 0.0}
    for name, program in PROGRAMS.items():
        if program.available():
            begun = time.perf_counter()
            if (compute := _made(name, module, few, task)) is not None:
                programs[name], costs[name] = compute, time.perf_counter() - begun
    seconds = _times(programs, few)
    best = min(seconds, key=lambda name: seconds[name])
    if seconds["torch"] < _GAIN * seconds[best]:
        best = "torch"
    result = Result(best, seconds["torch"] / seconds[best], costs[best])
    _remember(key, result)
    said = "PyTorch" if best == "torch" else f"{PROGRAMS[best].title}, {result.speed:.2f}× PyTorch"
    log.info(f"Engine: {said}.")
    return best, programs[best]


def unsafe(name: EngineName, given: Tensor, expected: Tensor, task: Task | None) -> str | None:
    """The reason why an engine must not be used, by its outputs and PyTorch's, (B, M); None if they agree."""
    tolerance = PROGRAMS[name].tolerance
    theirs, ours = given.numpy(), expected.numpy()
    if theirs.shape != ours.shape:
        return f"its outputs have the shape {theirs.shape}, and PyTorch's {ours.shape}"
    scale = float(np.abs(ours).max())
    difference = float(np.abs(theirs - ours).max()) / (scale or 1.0)
    if not difference <= tolerance:  # so that NaN fails too
        return f"its outputs differ from PyTorch's by {difference:.1e}, more than {tolerance:.0e}"
    wrong = 0 if task is None else int((~task.same(theirs, ours, tolerance)).sum())
    return f"{wrong} of {len(ours)} answers differ from PyTorch's" if wrong else None


def _made(name: EngineName, module: nn.Module, images: Tensor, task: Task | None) -> Compute | None:
    """An engine if it can be made for this model and is safe."""
    try:
        compute = PROGRAMS[name].make(module, images)
        # The first image on its own, to test more than one batch size.
        reasons = [unsafe(name, compute(part), module(part), task) for part in (images, images[:1])]
    except Exception as error:  # compilers raise many types, and a model may need what they do not support
        reasons = [(str(error) or type(error).__name__).strip().splitlines()[-1]]
    reason = next(filter(None, reasons), None)
    if reason is None:
        return compute
    log.info(f"The engine {name} is not used: {reason}.")
    return None


def _few(module: nn.Module, images: Tensor) -> Tensor:
    """As many images of a batch as PyTorch computes in a moment."""
    first = images[: max(1, len(images) // 16)]
    begun = time.perf_counter()
    module(first)
    each = (time.perf_counter() - begun) / len(first)
    return images[: max(1, min(len(images), int(_SECONDS / each)))]


def _times(programs: dict[EngineName, Compute], images: Tensor) -> dict[EngineName, float]:
    """Seconds per batch: the fastest of some runs, which take turns because the load of the machine varies."""
    seconds = dict.fromkeys(programs, float("inf"))
    start, rounds = time.perf_counter(), 0
    while rounds < _ROUNDS or time.perf_counter() - start < _SECONDS:
        for name, compute in programs.items():
            begun = time.perf_counter()
            compute(images)
            seconds[name] = min(seconds[name], time.perf_counter() - begun)
        rounds += 1
    return seconds


def _key(about: str, images: Tensor) -> str:
    used = [f"torch {torch.__version__}"]
    used += [f"{p.package} {version(p.package)}" for p in PROGRAMS.values() if p.package and p.available()]
    return f"{hardware('cpu')}; {', '.join(used)}; {about}; batches of {len(images)}"


def _results() -> dict[str, object]:
    with suppress(OSError, ValueError, RecursionError):  # missing or damaged: measure again
        results = json.loads(read_text(cache_folder() / "engines.json"))
        if isinstance(results, dict):
            return results
    return {}


def _recall(key: str) -> Result | None:
    match _results().get(key):
        case {"engine": str(engine), "speed": float(speed), "cost": float(cost)} if engine == "torch" or (
            engine in PROGRAMS and PROGRAMS[engine].available()
        ):
            return Result(engine, speed, cost)  # type: ignore[arg-type]
    return None


def _remember(key: str, result: Result) -> None:
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        write_text(cache_folder() / "engines.json", json.dumps(_results() | {key: asdict(result)}, indent=2) + "\n")
    except (OSError, UserError) as error:
        log.info(f"The choice of the engine is not cached: {error}")
