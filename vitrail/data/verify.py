"""Verifies that images can be read, once per version of an image.

Decoding all images each time a data set is opened would take minutes. The facts of readable images are cached in
`verified.sqlite` in the cache folder, by name and version: for a file, its path, size and modification time. Unreadable
images are tried again each time, because permissions may change without a trace. If the database is damaged, locked or
read-only, images are verified again.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import astuple, fields
from pathlib import Path
from typing import TypeVar

import PIL

from vitrail.data.download import cache_folder
from vitrail.data.images import ImageFacts, UnreadableImage, inspect_image
from vitrail.progress import track
from vitrail.version import VERSION

T = TypeVar("T")
Identity = tuple[str, str]  # name and version of an image

_STEP = 1024  # images submitted to the threads at a time, to limit memory
_ROWS = 500  # keys per query
_SECONDS = 5  # to wait for another writer
_FIELDS = [field.name for field in fields(ImageFacts)]
_NAME = f"facts_{'_'.join(_FIELDS)}"
_TABLE = f"CREATE TABLE IF NOT EXISTS {_NAME} (key BLOB PRIMARY KEY, {', '.join(_FIELDS)}, checksum) WITHOUT ROWID"


def verify(
    items: Sequence[T], inspect: Callable[[T], ImageFacts], identify: Callable[[T], Identity | None] | None = None
) -> list[ImageFacts | str]:
    """The facts of every image, or the reason why it cannot be read.

    Images with the same identity as in an earlier call are not inspected again.
    """
    keys = [None if identify is None else _key(identify(item)) for item in items]
    known = _recall({key for key in keys if key is not None})
    new = [i for i, key in enumerate(keys) if key is None or key not in known]
    answers: list[ImageFacts | str | None] = [None if key is None else known.get(key) for key in keys]
    learnt = {}
    for i, answer in zip(new, _inspect([items[i] for i in new], inspect), strict=True):
        answers[i], key = answer, keys[i]
        if key is not None and isinstance(answer, ImageFacts):
            learnt[key] = answer
    _remember(learnt)
    return [answer for answer in answers if answer is not None]


def verify_files(paths: Sequence[Path]) -> list[ImageFacts | str]:
    """`verify` for image files."""
    return verify(paths, inspect_image, _file_identity)


def _file_identity(path: Path) -> Identity | None:
    try:
        state = path.stat()
    except (OSError, ValueError):  # the latter for names that no file can have
        return None  # reading it will give the reason
    return str(path.absolute()), f"{state.st_size} {state.st_mtime_ns}"


def _inspect(items: Sequence[T], inspect: Callable[[T], ImageFacts]) -> list[ImageFacts | str]:
    def look(item: T) -> ImageFacts | str:
        try:
            return inspect(item)
        except UnreadableImage as error:
            return str(error)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        answers = (answer for at in range(0, len(items), _STEP) for answer in pool.map(look, items[at : at + _STEP]))
        return list(track(answers, "verifying images", total=len(items), unit="img"))


# Cache ----------------------------------------------------------------------------------------------------


def _key(identity: Identity | None) -> bytes | None:
    """A hash of the image's identity and of the software that reads it."""
    if identity is None:
        return None
    text = "\0".join((VERSION, PIL.__version__, *_FIELDS, *identity))
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=16).digest()


def _file() -> Path:
    return cache_folder() / "verified.sqlite"


def _open() -> sqlite3.Connection:
    _file().parent.mkdir(parents=True, exist_ok=True)
    return sqlite3.connect(_file(), timeout=_SECONDS)


def _recall(keys: Iterable[bytes]) -> dict[bytes, ImageFacts]:
    ordered, known = list(keys), {}
    if not ordered:
        return {}
    try:
        with closing(_open()) as memory:
            for at in range(0, len(ordered), _ROWS):
                some = ordered[at : at + _ROWS]
                marks = ", ".join("?" * len(some))
                for key, *values, checksum in memory.execute(f"SELECT * FROM {_NAME} WHERE key IN ({marks})", some):
                    h, w, grey, *others = values
                    facts = ImageFacts(h, w, bool(grey), *others)
                    if checksum == _checksum(key, facts):
                        known[key] = facts
    except Exception:
        return {}  # no database yet, or a damaged one
    return known


def _checksum(key: bytes, facts: ImageFacts) -> bytes:
    """Detects what the database does not: damage within a row."""
    return hashlib.blake2b(key + repr(astuple(facts)).encode(), digest_size=8).digest()


def _remember(learnt: Mapping[bytes, ImageFacts]) -> None:
    if not learnt:
        return
    rows = [(key, *astuple(facts), _checksum(key, facts)) for key, facts in learnt.items()]
    try:
        with closing(_open()) as memory, memory:
            memory.execute(_TABLE)
            memory.executemany(f"INSERT OR REPLACE INTO {_NAME} VALUES ({', '.join('?' * len(rows[0]))})", rows)
    except sqlite3.OperationalError:
        pass  # locked, full or read-only
    except sqlite3.DatabaseError:
        with suppress(OSError):
            _file().unlink()  # damaged: the next call creates a new one
    except OSError:
        pass  # the cache folder cannot be created
