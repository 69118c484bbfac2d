"""Atomic file writes: to a temporary file in the same folder, flushed, then renamed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vitrail.errors import UserError


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yields a temporary path to write to, and renames it to `path` on success; on failure `path` is unchanged."""
    temporary = path.with_name(f".{path.name}.tmp")  # a fixed name: the next write replaces what a killed one left
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise UserError(
            f"Could not write {path}: {error.strerror or error}. An existing file is unchanged. "
            "Free some space or choose another folder."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a UTF-8 text file atomically."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
