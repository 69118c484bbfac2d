"""Latency, throughput and memory of a model, measured in a process of its own.

`python -m vitrail.runs.speed SOURCE` prints them as JSON. In a fresh process the peak memory is that of this model, and
an exported file is measured as it is deployed: without torch.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from vitrail.errors import UserError
from vitrail.runs.exported import is_exported
from vitrail.runs.predictor import Predictor
from vitrail.runs.session import Array

_BATCH = 16
_CANNOT_OPEN = 3  # exit code
_SECONDS = 0.5  # per batch size


@dataclass(frozen=True)
class Speed:
    """The speed of a model on this CPU, and its process's peak memory."""

    latency_ms: float  # of one image
    images_per_second: float  # in batches of 16
    peak_mb: float  # 0 where the system does not tell


def measured(source: str | Path) -> Speed | None:
    """The speed of a run, a weights file or an exported file, computed as it is by its own runtime.

    None if another process cannot open it, such as a module of the caller's own.
    """
    command = [sys.executable, "-m", "vitrail.runs.speed", str(source)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode == _CANNOT_OPEN:
        return None
    if answer.returncode:
        raise RuntimeError(f"The speed of {source} cannot be measured: {answer.stderr.strip()}")
    return Speed(**json.loads(answer.stdout.splitlines()[-1]))


def measure(source: str) -> Speed:
    """`measured`, in this process."""
    predictor = Predictor(source) if is_exported(source) else Predictor(source, "cpu", engine="torch")
    seen = predictor.card.preprocess
    shape = (_BATCH, seen.channels, *seen.img_size)
    pixels = np.random.default_rng(0).integers(0, 255, shape, np.uint8, endpoint=True).astype(seen.dtype)
    seconds = {size: _fastest(predictor, pixels[:size]) for size in (1, _BATCH)}
    return Speed(1000 * seconds[1], _BATCH / seconds[_BATCH], _peak())


def _fastest(predictor: Predictor, pixels: Array) -> float:
    """Seconds of the fastest run; the load of the machine varies, but never makes a run faster."""
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - begun < _SECONDS:
        start = time.perf_counter()
        predictor.outputs(pixels)
        times.append(time.perf_counter() - start)
    return min(times)


def _peak() -> float:
    status = Path("/proc/self/status")
    if status.exists():  # `getrusage` would count the memory of the parent process, too
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024e-6
    try:
        import resource
    except ImportError:  # Windows
        return 0.0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1e-6 if sys.platform == "darwin" else 1024e-6)


if __name__ == "__main__":
    try:
        print(json.dumps(asdict(measure(sys.argv[1]))))
    except UserError:
        sys.exit(_CANNOT_OPEN)
