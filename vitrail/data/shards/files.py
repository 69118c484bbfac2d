"""The tar file of a shard: on disk, or at an address."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from vitrail.data.shards.cache import RemoteFile
from vitrail.files import open_regular


@dataclass(frozen=True)
class LocalFile:
    """A file on disk."""

    path: Path
    version: str = ""  # the checksum of the manifest

    def __str__(self) -> str:
        return str(self.path)

    def open(self) -> BinaryIO:
        return open_regular(self.path)


ShardFile = LocalFile | RemoteFile
