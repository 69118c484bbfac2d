"""Progress bars (on a terminal only) and log lines."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")

log = logging.getLogger("vitrail")


class _Console(logging.Handler):
    """Writes log lines to stderr without breaking a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)


def log_to_console() -> None:
    """Shows vitrail's log on stderr, unless the program has configured logging itself."""
    if not log.handlers and not logging.getLogger().handlers:
        log.addHandler(_Console())
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)


def track(items: Iterable[T], title: str, total: int | None = None, unit: str = "it", done: int = 0) -> tqdm[T]:
    """Iterates over `items` with a progress bar, which is disabled if stderr is not a terminal."""
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
