"""Streaming: shards of images that can only be read sequentially and are not stored.

The number of images in each shard and their labels are known up front. So the order of an epoch is drawn before
anything is read, as for images on disk, and a resumed run skips the shards that it has finished.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from vitrail.data.dataset import Numbers, Split
from vitrail.data.images import Pixels, UnreadableImage, read_image
from vitrail.errors import UserError

BUFFER = 4096  # size of the shuffle buffer, in encoded images


class Stream(Protocol):
    """Shards of encoded images."""

    @property
    def name(self) -> str: ...

    @property
    def counts(self) -> Sequence[int]:
        """The number of images in each shard."""

    def read(self, shard: int) -> Iterator[bytes]:
        """The encoded images of a shard in order; empty bytes for a missing one."""


@dataclass(frozen=True, eq=False)
class StreamSplit(Split):
    """Rows of a stream. `image` reads a shard up to that image; use `reader` for many images."""

    streamed: ClassVar[bool] = True

    stream: Stream
    rows: Numbers  # ascending, numbered across all shards
    targets: Numbers

    def __len__(self) -> int:
        return len(self.rows)

    def image(self, i: int) -> Pixels:
        return self.reader(np.array([i])).image(i)

    def name(self, i: int) -> str:
        return f"{self.stream.name}/{self.rows[i]}"

    def order(self, rng: np.random.Generator) -> Numbers:
        """A random order: shuffled shards, then a shuffle buffer of BUFFER images."""
        shards = self.shards(np.arange(len(self)))
        arrival = np.argsort(rng.permutation(len(self.stream.counts))[shards], kind="stable")
        return arrival[np.argsort(np.arange(len(self)) + rng.uniform(0, BUFFER, len(self)))]

    def reader(self, wanted: Numbers) -> StreamReader:
        """A reader for these images, each to be requested once and roughly in this order."""
        if len(np.unique(wanted)) < len(wanted):
            raise UserError("A stream delivers every image once, but some are needed twice. Drop --streaming.")
        return StreamReader(self, wanted)

    def shards(self, numbers: Numbers) -> Numbers:
        """The shard of each image."""
        return np.searchsorted(np.cumsum(self.stream.counts), self.rows[numbers], side="right")


class StreamReader(Split):
    """One sequential pass over a stream, shared by several threads."""

    def __init__(self, split: StreamSplit, wanted: Numbers):
        self.split = split
        self._buffer: dict[int, bytes] = {}  # read, but not requested yet
        self._incoming = self._read(wanted)
        self._lock = threading.Lock()
        self._failure: UserError | None = None

    @property
    def targets(self) -> Numbers:
        return self.split.targets

    def __len__(self) -> int:
        return len(self.split)

    def name(self, i: int) -> str:
        return self.split.name(i)

    def image(self, i: int) -> Pixels:
        with self._lock:
            while i not in self._buffer:
                if self._failure is not None:  # another thread hit it, and the stream has ended
                    raise self._failure
                try:
                    number, content = next(self._incoming)
                except UserError as error:
                    self._failure = error
                    raise
                self._buffer[number] = content
            content = self._buffer.pop(i)
        try:
            return read_image(content)
        except UnreadableImage as error:
            raise UserError(
                f"{self.name(i)} cannot be read: {error}. Streamed images are not verified up front. Drop --streaming "
                "to skip unreadable images."
            ) from error

    def _read(self, wanted: Numbers) -> Iterator[tuple[int, bytes]]:
        """The wanted images with their numbers, as they arrive; shards without any are not opened."""
        shards = self.split.shards(wanted)
        starts = np.cumsum([0, *self.split.stream.counts])
        for shard in dict.fromkeys(shards.tolist()):
            numbers = wanted[shards == shard]
            places = dict(zip((self.split.rows[numbers] - starts[shard]).tolist(), numbers.tolist(), strict=True))
            for place, content in enumerate(self.split.stream.read(shard)):
                if place in places:
                    yield places.pop(place), content
                if not places:
                    break
            if places:
                raise UserError(f"{self.split.stream.name} has fewer images than when it was opened. Open it again.")
