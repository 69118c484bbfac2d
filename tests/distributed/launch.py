"""Commands under torchrun, on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def environment(**more: str) -> dict[str, str]:
    """One thread per process, and no warning of torchrun about it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default"} | more


def torchrun(processes: int, *words: str, **how: Any) -> list[str]:
    """The command line of torchrun for a module (-m …) or a program."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in how.items()]
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"),
        *options,
        *words,
    ]


def run(processes: int, *words: str, env: dict[str, str] | None = None, **how: Any) -> subprocess.CompletedProcess[str]:
    """Runs `vitrail` with some processes; the caller looks at the exit code."""
    words = ("-m", "vitrail", *words)
    command = torchrun(processes, *words, **how) if processes > 1 else [sys.executable, *words]
    return subprocess.run(command, env=environment(**(env or {})), capture_output=True, text=True, timeout=300)
