"""Metrics in the text format of Prometheus, summed over all worker processes.

Each worker writes to its own row of an array in shared memory, and whichever answers `/metrics` adds the rows up. A
worker that takes the place of a dead one continues on its row, so that counters never decrease. No file is written.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

ROUTES = ("/predict", "/explain", "/embed", "/model", "/models", "/health", "/ready", "/metrics", "other")
STATUSES = (200, 304, 400, 401, 403, 404, 405, 408, 413, 415, 421, 422, 500, 503, 0)  # 0: any other
TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_BATCHES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)


@dataclass(frozen=True)
class Family:
    """A metric: its name in the output, and the values of its labels."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[tuple[str, tuple[str, ...]], ...] = ()
    buckets: tuple[float, ...] = ()

    def series(self) -> Iterator[dict[str, str]]:
        for values in product(*(values for _, values in self.labels)):
            yield dict(zip((name for name, _ in self.labels), values, strict=True))

    @property
    def width(self) -> int:
        """Numbers per series: of a histogram the buckets, the rest, and the sum."""
        return len(self.buckets) + 2 if self.kind == "histogram" else 1


def families(models: Sequence[str]) -> dict[str, Family]:
    """The metrics of a service by short name."""
    routes, named = ("route", ROUTES), ("model", tuple(models))
    statuses = ("status", tuple(map(str, STATUSES)))
    return {
        "requests": Family("vitrail_requests_total", "counter", "Requests answered.", (routes, statuses)),
        "seconds": Family("vitrail_request_seconds", "histogram", "Time to answer a request.", (routes,), _SECONDS),
        "images": Family("vitrail_images_total", "counter", "Images answered.", (named,)),
        "batch": Family("vitrail_batch_images", "histogram", "Images computed together.", (), _BATCHES),
        "compute": Family("vitrail_compute_seconds", "histogram", "Time to compute a batch.", (), _SECONDS),
        "queue": Family("vitrail_queue_images", "gauge", "Images accepted and not yet answered."),
        "rejected": Family(
            "vitrail_rejected_total", "counter", "Requests refused with 503.", (("reason", ("full", "late")),)
        ),
        "reloads": Family(
            "vitrail_reloads_total",
            "counter",
            "New versions of a model, swapped in or refused.",
            (named, ("result", ("swapped", "failed"))),
        ),
        "memory": Family("vitrail_resident_memory_bytes", "gauge", "Resident memory of all worker processes."),
    }


class Shared:
    """The numbers of all workers: picklable to processes that `multiprocessing` spawns."""

    def __init__(self, models: Sequence[str], workers: int):
        self.models, self.rows = tuple(models), workers + 2  # during a rolling restart there are more of them
        length = self.rows * sum(f.width * len(list(f.series())) for f in families(models).values())
        self.values: Any  # numbers of each worker, a row each
        self.owners: Any  # their process ids
        self._claims: Any
        self._loading: Any
        self._loader: Any  # the process that loads its models
        if workers == 1:
            self.values, self.owners = [0.0] * length, [0] * self.rows
            self._claims, self._loading, self._loader = threading.Lock(), threading.Lock(), [0]
            return
        context = multiprocessing.get_context("spawn")
        self.values, self.owners = context.RawArray("d", length), context.RawArray("q", self.rows)
        self._claims, self._loading, self._loader = context.Lock(), context.Lock(), context.RawArray("q", 1)

    def claim(self) -> int | None:
        """A row for this process: a free one, or that of a process that has ended."""
        with self._claims:
            for row in range(self.rows):
                if not _exists(self.owners[row]):
                    self.owners[row] = os.getpid()
                    return row
        return None

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Held while a worker loads its models, because the speed test of engines needs quiet."""
        while not self._loading.acquire(timeout=1):
            if not _exists(self._loader[0]):
                break  # killed while it was loading
        self._loader[0] = os.getpid()
        try:
            yield
        finally:
            with suppress(ValueError, RuntimeError):  # two have taken the place of a killed one
                self._loading.release()


class Metrics:
    """The metrics of this process, and the sums over all."""

    def __init__(self, shared: Shared):
        self._families = families(shared.models)
        self._shared = shared
        self._lock = threading.Lock()
        self._starts: dict[tuple[str, tuple[str, ...]], int] = {}
        self._width = 0
        for short, family in self._families.items():
            for labels in family.series():
                self._starts[short, tuple(labels.values())] = self._width
                self._width += family.width
        row = shared.claim()
        self._values: Any = shared.values if row is not None else [0.0] * self._width
        self._row = 0 if row is None else row * self._width
        self.set("queue", 0)

    def add(self, short: str, amount: float = 1, **labels: str) -> None:
        """Increases a counter."""
        with self._lock:
            self._values[self._at(short, labels)] += amount

    def set(self, short: str, value: float) -> None:
        """Sets a gauge."""
        self._values[self._at(short, {})] = value

    def observe(self, short: str, value: float, **labels: str) -> None:
        """Adds a value to a histogram."""
        buckets = self._families[short].buckets
        at = self._at(short, labels)
        with self._lock:
            self._values[at + bisect_left(buckets, value)] += 1
            self._values[at + len(buckets) + 1] += value

    def request(self, path: str, status: int, seconds: float) -> None:
        """Counts an answered request."""
        route = path if path in ROUTES else "other"
        self.add("requests", route=route, status=str(status if status in STATUSES else 0))
        self.observe("seconds", seconds, route=route)

    def measure_memory(self) -> None:
        self.set("memory", _resident())

    def text(self, versions: Sequence[tuple[str, str]]) -> str:
        """All metrics, with the versions of the models."""
        self.measure_memory()
        lines = ["# HELP vitrail_model_info Versions of the models.", "# TYPE vitrail_model_info gauge"]
        lines += [f'vitrail_model_info{{model="{name}",version="{version}"}} 1' for name, version in versions]
        for short, family in self._families.items():
            lines += [f"# HELP {family.name} {family.help}", f"# TYPE {family.name} {family.kind}"]
            for labels in family.series():
                lines += self._lines(family, labels, self._sums(short, tuple(labels.values()), family.width))
        return "\n".join(lines) + "\n"

    def _at(self, short: str, labels: dict[str, str]) -> int:
        return self._row + self._starts[short, tuple(labels.values())]

    def _sums(self, short: str, labels: tuple[str, ...], width: int) -> list[float]:
        start, shared, step = self._starts[short, labels], self._shared.values, self._width
        rows = range(0, len(shared), step)
        if self._families[short].kind == "gauge":  # those of dead processes no longer count
            rows = [row for row in rows if _exists(self._shared.owners[row // step])]  # type: ignore[assignment]
        return [sum(shared[row + start + i] for row in rows) for i in range(width)]

    def _lines(self, family: Family, labels: dict[str, str], values: list[float]) -> list[str]:
        inner = ",".join(f'{name}="{value}"' for name, value in labels.items())
        braced = f"{{{inner}}}" if inner else ""
        if family.kind != "histogram":
            # Series that never happened are left out, if there would be many.
            return [f"{family.name}{braced} {values[0]:.17g}"] if values[0] or len(labels) < 2 else []
        counts, total, lines = values[:-1], 0.0, []
        if not sum(counts) and labels:
            return []
        for bound, count in zip((*map("{:g}".format, family.buckets), "+Inf"), counts, strict=True):
            total += count
            lines.append(f'{family.name}_bucket{{{inner}{"," if inner else ""}le="{bound}"}} {total:.17g}')
        return [*lines, f"{family.name}_sum{braced} {values[-1]:.17g}", f"{family.name}_count{braced} {total:.17g}"]


def _exists(pid: int) -> bool:
    """Whether a process runs."""
    if pid == 0 or os.name == "nt":  # where `os.kill` cannot ask
        return pid != 0
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _resident() -> float:
    """The resident memory of this process, in bytes; 0 where it is unknown."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123  # read on every scrape
            return int(file.read().split()[1]) * float(os.sysconf("SC_PAGE_SIZE"))
    except OSError:
        return 0.0
