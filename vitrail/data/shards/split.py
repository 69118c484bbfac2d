"""Reading shards: images by number, in an order that needs only a few shards at a time."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace

import numpy as np

from vitrail.data.dataset import Array, Numbers, PackedSplit, Split, files_version
from vitrail.data.npy import check_mapped
from vitrail.data.pixels import UnreadableImage
from vitrail.data.shards.cache import RemoteFile
from vitrail.data.shards.files import LocalFile, ShardFile
from vitrail.errors import UserError

WINDOW = 32  # shards whose images are mixed
AHEAD = 2  # shards that are downloaded before they are needed
HELD = WINDOW + 1 + AHEAD + 1  # shards that are needed at a time


@dataclass(frozen=True, eq=False)
class Shard:
    """A tar file and the places of its images, in arrays, because there may be millions."""

    file: ShardFile
    names: Array  # bytes
    offsets: Numbers
    sizes: Numbers


class Shards:
    """The `Store` of images in shards; rows are numbered over all of them."""

    def __init__(self, shards: Sequence[Shard]):
        self._shards = shards
        self._starts = np.cumsum([0, *(len(shard.names) for shard in shards)])
        self._ahead: _Ahead | None = None

    def shard_numbers(self, rows: Numbers) -> Numbers:
        """The number of each row's shard."""
        return np.searchsorted(self._starts, rows, side="right") - 1

    def read(self, row: int) -> bytes:
        shard, i = self._locate(row)
        if self._ahead is not None:
            self._ahead.reading(shard.file)
        return read_at(shard, i)

    def member(self, row: int, offset: int, size: int) -> bytes:
        """Another file of the shard that has this row."""
        return _read(self._locate(row)[0].file, offset, size)

    def name(self, row: int) -> str:
        shard, i = self._locate(row)
        return f"{shard.file}/{shard.names[i].decode('utf-8', 'replace')}"

    def version(self) -> str | None:
        """None for remote shards: whether decoded images fit into their cache could only be told by reading many."""
        files = [shard.file for shard in self._shards]
        paths = [file.path for file in files if isinstance(file, LocalFile)]
        return files_version(paths) if len(paths) == len(files) else None

    def digest(self, rows: Numbers) -> str:
        """Changes with the order of these images and with their shards, by checksum, or by names and sizes."""
        digest = hashlib.blake2b(rows.tobytes(), digest_size=16)
        for number in np.unique(self.shard_numbers(rows)).tolist():
            shard = self._shards[number]
            check_mapped(shard.names)
            version = shard.file.version.encode()
            digest.update(version or np.column_stack([shard.offsets, shard.sizes]).tobytes() + shard.names.tobytes())
        return digest.hexdigest()

    def downloading_ahead(self, rows: Numbers) -> Shards:
        """The same images, to be read roughly in this order: the next shards are downloaded in the background."""
        numbers, first = np.unique(self.shard_numbers(rows), return_index=True)
        files = [self._shards[number].file for number in numbers[np.argsort(first)].tolist()]
        remote = [file for file in files if isinstance(file, RemoteFile)]
        if not remote:
            return self
        other = copy(self)
        other._ahead = _Ahead(remote)
        return other

    def _locate(self, row: int) -> tuple[Shard, int]:
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        check_mapped(self._shards[number].names)
        return self._shards[number], row - int(self._starts[number])


class _Ahead:
    """Downloads the shards that follow the one being read; failures are left to the reader, who tries again."""

    def __init__(self, files: Sequence[RemoteFile]):
        self._files = files
        self._place = {file: place for place, file in enumerate(files)}
        self._begun = 0
        self._lock = threading.Lock()

    def reading(self, file: ShardFile) -> None:
        if not isinstance(file, RemoteFile) or (place := self._place.get(file)) is None:
            return
        with self._lock:
            begin, end = max(self._begun, place + 1), place + 1 + AHEAD
            self._begun = max(self._begun, end)
        for following in self._files[begin:end]:
            threading.Thread(target=_download, args=(following,), name="vitrail-download", daemon=True).start()


def _download(file: RemoteFile) -> None:
    with suppress(Exception):
        file.download()


def read_at(shard: Shard, i: int) -> bytes:
    """The encoded image `i` of a shard."""
    return _read(shard.file, int(shard.offsets[i]), int(shard.sizes[i]))


def _read(shard: ShardFile, offset: int, size: int) -> bytes:
    try:
        # Opened on every read: cheap next to decoding, and there may be more shards than file descriptors.
        with shard.open() as file:
            if offset + size > os.fstat(file.fileno()).st_size:
                raise UnreadableImage("it is outside its shard")
            file.seek(offset)
            return file.read(size)
    except OSError as error:
        raise UnreadableImage(str(error.strerror or error).lower()) from error


@dataclass(frozen=True, eq=False)
class ShardSplit(PackedSplit):
    """Rows of shards that are remote or have a manifest."""

    store: Shards

    def order(self, rng: np.random.Generator) -> Numbers:
        """A random order: shuffled shards, and images mixed over a sliding window of WINDOW shards.

        It depends on the generator and the data alone, so it is the same for local and remote copies.
        """
        return self.arranged(np.arange(len(self)), rng)

    def arranged(self, numbers: Numbers, rng: np.random.Generator) -> Numbers:
        used, shards = np.unique(self.store.shard_numbers(self.rows[numbers % len(self)]), return_inverse=True)
        if len(used) <= WINDOW:
            return rng.permutation(numbers)
        arrival = np.argsort(rng.permutation(len(used))[shards], kind="stable")
        places = np.arange(len(numbers)) + rng.uniform(0, WINDOW * len(numbers) / len(used), len(numbers))
        return numbers[arrival[np.argsort(places, kind="stable")]]

    def grouped(self, order: Numbers, size: int) -> Numbers:
        """Sorts each batch by slot: the window has WINDOW of them, and a shard takes that of the one it follows.

        So the same part of every batch is filled by the same shards, from the first image of a shard to its last.
        """
        rows = self.rows[order % len(self)]
        _, first, shards = np.unique(self.store.shard_numbers(rows), return_index=True, return_inverse=True)
        slots = np.argsort(np.argsort(first)) % WINDOW
        return order[np.lexsort((rows, slots[shards], np.arange(len(order)) // size))]

    def reader(self, wanted: Numbers) -> Split:
        return replace(self, store=self.store.downloading_ahead(self.rows[wanted]))

    def digest(self) -> str:
        return self.store.digest(self.rows)


def check_room(files: Sequence[ShardFile], source: object) -> None:
    """Raises UserError if the cache cannot hold the shards that are needed at a time."""
    remote = sorted((file for file in files if isinstance(file, RemoteFile)), key=lambda file: -file.size)
    needed = sum(file.size for file in remote[:HELD])
    if remote and needed > remote[0].limit:
        raise UserError(
            f"--cache-gb must hold {min(HELD, len(remote))} shards of {source} at a time, "
            f"{needed / 2**30:.3g} GiB, but it is {remote[0].limit / 2**30:.3g}. Raise it, or write smaller shards: "
            "vitrail shard --shard-size."
        )
