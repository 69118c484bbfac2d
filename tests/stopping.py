"""Stops commands in this process at a chosen file, so that no test races with them."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class Killed(BaseException):
    """Ends a command in place of SIGKILL."""


@contextmanager
def killed(folder: Path, left: Path, file: str, count: int = 1) -> Iterator[None]:
    """Ends the command inside when a file whose path ends like this is about to be replaced so many times.

    `left` is then a copy of its folder as SIGKILL would have left it: nothing was flushed or tidied up.
    """

    def kill() -> None:
        shutil.copytree(folder, left)
        raise Killed

    with _hooked(file, count, before=kill), pytest.raises(Killed):
        yield


@contextmanager
def copied(folder: Path, left: Path, file: str, count: int = 1) -> Iterator[None]:
    """Copies a folder to `left` once such a file was replaced so many times. The command goes on."""
    with _hooked(file, count, after=lambda: shutil.copytree(folder, left)):
        yield


@contextmanager
def interrupted(file: str, count: int = 1) -> Iterator[None]:
    """Sends this process SIGINT, as Ctrl+C does, when such a file is about to be replaced so many times."""
    with _hooked(file, count, before=lambda: os.kill(os.getpid(), signal.SIGINT)):
        yield


def _nothing() -> None:
    pass


@contextmanager
def _hooked(
    file: str, count: int, before: Callable[[], object] = _nothing, after: Callable[[], object] = _nothing
) -> Iterator[None]:
    replace, seen = Path.replace, 0

    def replaced(source: Path, target: Path) -> Path:
        nonlocal seen
        seen += (chosen := str(target).endswith(file))
        now = chosen and seen == count
        if now:
            before()
        result = replace(source, target)
        if now:
            after()
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "replace", replaced)
        yield
