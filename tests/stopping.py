"""Runs a command that sends itself a signal just before a file takes its place, so that no test races with it.

python tests/stopping.py SIGTERM fold2/last/state.pt 1 train digits --folds 3
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path


def stop_at(name: str, file: str, count: int) -> None:
    """Has this process signal itself when a file whose path ends like this is about to be replaced so many times."""
    replace, left = Path.replace, count

    def stopping(source: Path, target: Path) -> Path:
        nonlocal left
        left -= str(target).endswith(file)
        if left == 0:
            left = -1
            os.kill(os.getpid(), signal.Signals[name])
        return replace(source, target)

    Path.replace = stopping  # type: ignore[method-assign]


def stopped(name: str, file: str, count: int, words: list[str]) -> tuple[int, str]:
    """The exit code and the messages of a command that is stopped so, on one thread."""
    command = [sys.executable, __file__, name, file, str(count), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


if __name__ == "__main__":
    stop_at(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    from vitrail.cli import main

    main(sys.argv[4:])
