"""The cache of remote shards: a folder of bounded size from which the least recently used ones are removed.

Processes and threads share it. Whoever needs a shard first downloads it, under a lock that the others wait for, to a
temporary file that is renamed when complete and verified. The size of a file is part of its name, so that unfinished
downloads count as well. A removed file stays readable for those who have opened it.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from vitrail.data.download import cache_folder
from vitrail.data.shards.fetch import fetch
from vitrail.errors import UserError
from vitrail.files import atomic_write, open_regular, open_to_append

try:
    import fcntl
except ImportError:  # Windows, where two processes may download the same shard; the first one's is replaced
    fcntl = None  # type: ignore[assignment]

GIGABYTES = 10.0  # GiB of the cache by default
_ABANDONED = 3600  # seconds after the last write, from which on an unfinished download is removed
_NAME = re.compile(r"\.?[0-9a-f]{32}-(\d{1,15})(\.\d+\.tmp)?")


@dataclass(frozen=True)
class RemoteFile:
    """A shard or an index at an address, which is downloaded when it is read."""

    address: str
    size: int  # bytes
    version: str  # changes with the content: the checksum, or what the server gives
    sha256: str | None = None
    limit: float = field(default=GIGABYTES * 2**30, compare=False)  # bytes of the cache

    def __str__(self) -> str:
        return self.address

    @property
    def path(self) -> Path:
        """The place in the cache."""
        text = f"{self.address} {self.version}".encode(errors="surrogateescape")
        return cache_folder() / "remote" / f"{hashlib.blake2b(text, digest_size=16).hexdigest()}-{self.size}"

    def open(self) -> BinaryIO:
        """The file, from the cache or downloaded to it."""
        while True:
            self.download()
            with suppress(FileNotFoundError):  # removed by another process since
                file = open_regular(self.path)
                os.utime(self.path)  # mark as used
                return file

    def download(self) -> None:
        """Makes the cache hold the file."""
        path = self.path
        if path.exists():
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with _held(path.parent / f"{path.name[:2]}.lock"):
                if path.exists():
                    return
                room = path.parent / "room.lock"
                with ExitStack() as renamed, atomic_write(path) as temporary:
                    with _held(room):
                        _make_room(path.parent, self.limit - self.size)
                        temporary.touch()
                    fetch(self.address, temporary, self.size, self.sha256)
                    # Who lists a folder during a rename may find neither name, and would make too little room.
                    renamed.enter_context(_held(room))
        except OSError as error:
            raise UserError(
                f"{self.address} cannot be stored in {path.parent}: {error.strerror or error}. Set $VITRAIL_CACHE to a "
                "folder with space, or lower --cache-gb."
            ) from error


@contextmanager
def _held(path: Path) -> Iterator[None]:
    """Holds a lock file; the system frees it when the process ends, however it ends."""
    with open_to_append(path) as file:
        if fcntl is not None:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make_room(folder: Path, budget: float) -> None:
    """Removes the least recently used files, and abandoned downloads, until the rest fits into the budget."""
    total, used = 0, []
    for path in folder.iterdir():
        found = _NAME.fullmatch(path.name)
        if found is None:
            continue
        with suppress(FileNotFoundError):
            changed = path.stat().st_mtime
            if found[2] is None:
                used.append((changed, int(found[1]), path))
            elif time.time() - changed > _ABANDONED:
                path.unlink()
                continue
            total += int(found[1])
    for _, size, path in sorted(used):
        if total <= budget:
            break
        path.unlink(missing_ok=True)
        total -= size
