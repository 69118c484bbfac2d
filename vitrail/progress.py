"""What a person sees while work goes on: progress bars on a terminal, log lines anywhere."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")

log = logging.getLogger("vitrail")


class _Console(logging.Handler):
    """Prints log lines to the standard error without tearing a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)


def speak() -> None:
    """Sends vitrail's log lines to the console, unless the program has its own logging."""
    if not log.handlers and not logging.getLogger().handlers:
        log.addHandler(_Console())
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)


def track(items: Iterable[T], title: str, total: int | None = None, unit: str = "it", done: int = 0) -> tqdm[T]:
    """Iterates with a progress bar on a terminal and silently elsewhere."""
    return tqdm(
        items,
        desc=title,
        total=total,
        unit=unit,
        initial=done,
        leave=False,
        disable=not sys.stderr.isatty(),
        dynamic_ncols=True,
    )
