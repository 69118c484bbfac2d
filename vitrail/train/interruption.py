"""Ctrl-C, SIGTERM and SIGHUP: training stops after the current step."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from vitrail.progress import log
from vitrail.runs.run import Run
from vitrail.world import world

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP


class Interruption:
    """A context that turns these signals into a request, so that training saves and stops after the step.

    After `training_is_over` there is nothing to save, and a signal stops the program at once.
    """

    def __init__(self, run: Path):
        self.requested = False
        self._run = run
        self._training = True
        self._terminals = [stream.fileno() for stream in (sys.stdout, sys.stderr) if stream.isatty()]
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number in (number for number in signal.Signals if number.name in _NAMES):
                if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                    self._before[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if kind is KeyboardInterrupt:
            log.info(f"Stopped. To resume: {Run(self._run).resume_command}")

    def training_is_over(self) -> None:
        """Lets a signal stop the program at once; one that has arrived does so now."""
        self._training = False
        if self.requested:
            raise KeyboardInterrupt

    def _request(self, number: int, _frame: FrameType | None) -> None:
        if signal.Signals(number).name == "SIGHUP":
            for terminal in self._terminals:  # it is gone: writing to it would fail
                os.dup2(os.open(os.devnull, os.O_WRONLY), terminal)
        if not self._training or (self.requested and world().size == 1):  # torchrun repeats a signal
            raise KeyboardInterrupt
        self.requested = True
        again = " Press Ctrl-C again to stop at once." if world().size == 1 else ""
        log.info(f"Stopping after this step, to save a checkpoint.{again}")
