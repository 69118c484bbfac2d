"""Images that come one after the other and are not kept: shards of a data set that can be read from the front only.

What is known is how many images each shard brings, and their labels. So the order of an epoch can be drawn before
anything is read, just as for images on the disk, and a run that resumes does not read the shards that it is past.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from vitrail.data.dataset import Numbers
from vitrail.data.images import Pixels, UnreadableImage, read_image
from vitrail.errors import UserError

BUFFER = 4096  # images that are held, encoded, at most, to be shuffled


class Stream(Protocol):
    """Shards of encoded images."""

    @property
    def name(self) -> str: ...

    @property
    def counts(self) -> Sequence[int]:
        """How many images there are in each shard."""

    def read(self, shard: int) -> Iterator[bytes]:
        """The content of each image's file, in order; an empty one where there is none."""


@dataclass(frozen=True, eq=False)
class StreamSplit:
    """Rows of a stream; `image` reads a shard up to the image, so whoever wants many asks `reading` for them."""

    stream: Stream
    rows: Numbers  # ascending, counted through all shards
    targets: Numbers

    def __len__(self) -> int:
        return len(self.rows)

    def image(self, i: int) -> Pixels:
        return self.reading(np.array([i])).image(i)

    def name(self, i: int) -> str:
        return f"{self.stream.name}/{self.rows[i]}"

    def order(self, rng: np.random.Generator) -> Numbers:
        """A random order: the shards are shuffled, and then each image waits while up to BUFFER others pass."""
        shards = self.shards(np.arange(len(self)))
        brought = np.argsort(rng.permutation(len(self.stream.counts))[shards], kind="stable")
        return brought[np.argsort(np.arange(len(self)) + rng.uniform(0, BUFFER, len(self)))]

    def reading(self, wanted: Numbers) -> StreamReading:
        """The images of these numbers, which must be asked for once each and about in this order."""
        if len(np.unique(wanted)) < len(wanted):
            raise UserError("A stream brings every image once, but some are wanted twice. Leave --streaming out.")
        return StreamReading(self, wanted)

    def shards(self, numbers: Numbers) -> Numbers:
        """The shards that images lie in."""
        return np.searchsorted(np.cumsum(self.stream.counts), self.rows[numbers], side="right")


class StreamReading:
    """A split that is being read from front to end by several threads."""

    def __init__(self, split: StreamSplit, wanted: Numbers):
        self.split, self.targets = split, split.targets
        self._waiting: dict[int, bytes] = {}  # read, but not asked for yet
        self._coming = self._read(wanted)
        self._lock = threading.Lock()
        self._failure: UserError | None = None

    def __len__(self) -> int:
        return len(self.split)

    def name(self, i: int) -> str:
        return self.split.name(i)

    def image(self, i: int) -> Pixels:
        with self._lock:
            while i not in self._waiting:
                if self._failure is not None:  # another thread has met it, and the stream is at its end
                    raise self._failure
                try:
                    number, content = next(self._coming)
                except UserError as error:
                    self._failure = error
                    raise
                self._waiting[number] = content
            content = self._waiting.pop(i)
        try:
            return read_image(content)
        except UnreadableImage as error:
            raise UserError(
                f"{self.name(i)} cannot be read: {error}. Images of a stream are not checked before; without "
                "--streaming they are, and such ones are left out."
            ) from error

    def _read(self, wanted: Numbers) -> Iterator[tuple[int, bytes]]:
        """The wanted images as the stream brings them, with their numbers; shards without any are not opened."""
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
                raise UserError(f"{self.split.stream.name} has fewer images than when it was opened: open it again.")
