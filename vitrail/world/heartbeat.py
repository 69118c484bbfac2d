"""Finds processes that hang: stopped, swapped out, or on a machine that no longer answers.

A process whose torchrun was killed gets the signal to save and stop.

A process may compute, download or decode for hours while the others wait for it. It is alive as long as its heartbeat
is: a thread that counts in the store of all processes. The first process watches the others, and they watch the first.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_LOOKS = 20  # within the timeout
_LEFT = 2**40  # added to the count of a process that has ended its work


class Heartbeat:
    """The heartbeat of this process. If that of another one stops, `give_up` gets its rank."""

    def __init__(self, store: Any, rank: int, size: int, timeout: float, give_up: Callable[[int], object]):
        self._store = store.clone()  # a connection of its own: the main thread may wait with the other one
        self._rank, self._give_up, self._interval = rank, give_up, timeout / _LOOKS
        self._watched = range(1, size) if rank == 0 else range(1)
        self._parent = os.getppid()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vitrail-heartbeat", daemon=True)
        self._thread.start()
        atexit.register(self._stop)  # a thread must not run while Python ends

    def _run(self) -> None:
        # Looks are counted, not seconds: all processes may have been stopped together, or the machine suspended.
        counts, looks = dict.fromkeys(self._watched, 0), dict.fromkeys(self._watched, 0)
        while not self._over.wait(self._interval):
            if os.getppid() != self._parent:  # torchrun was killed
                os.kill(os.getpid(), signal.SIGTERM)
                return
            with suppress(RuntimeError):  # the process that has the store has ended
                self._add(self._rank, 1)
                for rank in self._watched:
                    count = self._add(rank, 0)
                    looks[rank] = looks[rank] + 1 if count == counts[rank] < _LEFT else 0
                    counts[rank] = count
                    if looks[rank] >= _LOOKS:
                        self._give_up(rank)

    def _stop(self) -> None:
        self._over.set()
        self._thread.join(self._interval)
        if not self._thread.is_alive():  # else it waits for a store that no longer answers
            with suppress(RuntimeError):
                self._add(self._rank, _LEFT)

    def _add(self, rank: int, number: int) -> int:
        count: int = self._store.add(f"vitrail/heartbeat/{rank}", number)
        return count
