"""Progress bars on a terminal, progress in lines elsewhere, and the log."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from tqdm import tqdm

from vitrail.world import is_first

T = TypeVar("T")

log = logging.getLogger("vitrail")

LINE_EVERY = 30.0  # seconds between lines of progress, without a terminal


class _Console(logging.Handler):
    """Writes log lines to stderr without breaking a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)


def log_to_console() -> None:
    """Shows vitrail's log on stderr, once, unless the program has configured logging itself."""
    if not log.handlers and not logging.getLogger().handlers:
        log.addHandler(_Console() if is_first() else logging.NullHandler())
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)


@contextmanager
def without_info() -> Iterator[None]:
    """Leaves log lines below warnings out, for what has been logged before."""

    def important(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING

    log.addFilter(important)
    try:
        yield
    finally:
        log.removeFilter(important)


def track(items: Iterable[T], title: str, total: int | None = None, unit: str = "it", done: int = 0) -> Iterable[T]:
    """Iterates over `items` with a progress bar, or, in notebooks and pipes, with a log line every half minute."""
    if not sys.stderr.isatty() or not is_first():
        return _in_lines(items, title, total, unit, done)
    return tqdm(items, desc=title, total=total, unit=unit, initial=done, leave=False, dynamic_ncols=True)


def _in_lines(items: Iterable[T], title: str, total: int | None, unit: str, done: int) -> Iterator[T]:
    begun = spoke = time.monotonic()
    for count, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        if now - spoke >= LINE_EVERY:
            spoke = now
            of = "" if total is None else f" of {total:,}"
            left = "" if total is None else f", {(now - begun) / count * (total - done - count):.0f} s left"
            log.info(f"{title}: {done + count:,}{of} {unit}{left}")
