"""Files that are either whole or not there: written beside their place, flushed, then renamed into it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vitrail.errors import UserError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path to write to; `path` gets the new content at the end, or keeps the old one."""
    temporary = path.with_name(f".{path.name}.tmp")  # one name, so that what a kill leaves is replaced next time
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise UserError(
            f"Could not write {path}: {error.strerror or error}. Whatever was there before is untouched. "
            "Make room or choose another place."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replaces a text file as a whole."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
