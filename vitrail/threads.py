"""How many threads compute, and how they wait for each other: settings that libgomp reads when torch is loaded."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def settle_threads() -> None:
    """Suits the threads of this process to the container and to the load of the machine, unless the user has."""
    limit_threads()
    # Threads that wait for each other yield soon, or at once on a busy machine. Beside eight busy programs on two
    # cores, a small ViT trains 5 times slower with a fair share. With libgomp's default of spinning it was 56 times
    # slower, with yielding soon 17 times, and with yielding at once 5.1 times. Alone, yielding at once costs 43 %
    # (benchmarks/neighbour.py).
    if is_busy():
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    else:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def limit_threads(file: str = "/sys/fs/cgroup/cpu.max") -> None:
    """Computes with no more threads than the cores of the container: others would only wait for each other."""
    with suppress(OSError, ValueError):  # no container, or no limit
        quota, period = map(int, Path(file).read_text(encoding="ascii").split())
        os.environ.setdefault("OMP_NUM_THREADS", str(min(max(quota // period, 1), os.cpu_count() or 1)))


def is_busy(file: str = "/proc/loadavg") -> bool:
    """Whether other programs want more than all cores, both now and on average over the last minute."""
    with suppress(OSError, ValueError):  # not Linux
        average, _, _, running, _ = Path(file).read_text(encoding="ascii").split()
        return min(float(average), int(running.partition("/")[0]) - 1) > (os.cpu_count() or 1)
    return False
