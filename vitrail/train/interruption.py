"""Ctrl-C and SIGTERM: training stops after the current step."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from vitrail.progress import log
from vitrail.runs.run import Run


class Interruption:
    """A context that turns SIGINT and SIGTERM into a request, so that training saves and stops after the step."""

    def __init__(self, run: Path):
        self.requested = False
        self._run = run
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if kind is KeyboardInterrupt:
            log.info(f"Stopped. To resume: {Run(self._run).resume_command}")

    def _request(self, _number: int, _frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        log.info("Stopping after this step, to save a checkpoint. Press Ctrl-C again to stop at once.")
