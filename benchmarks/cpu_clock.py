"""Time budgets in CPU time, so that runs of one thread can share a machine.

They also share its caches and memory: on a busy machine a run trains up to a fifth fewer images in the same CPU time.
"""

from __future__ import annotations

import time
from types import SimpleNamespace

import torch

from vitrail.train import pace, progress

CORES = 2

torch.set_num_threads(1)
pace.time = progress.time = SimpleNamespace(monotonic=time.process_time)  # type: ignore[attr-defined]  # imported


def budget(minutes: float, cores: int = CORES) -> str:
    """The time budget of a run that has the CPU time of this many minutes on this many cores."""
    return f"{60 * cores * minutes:g}s"
