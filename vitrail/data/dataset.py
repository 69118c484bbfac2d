"""`Data` and its splits, whatever source they come from."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from vitrail.data.images import Pixels, read_image
from vitrail.data.npy import check_mapped
from vitrail.data.pixels import BIT_DEPTHS
from vitrail.errors import UserError
from vitrail.tasks import Task

Numbers = npt.NDArray[np.int64]
Array = npt.NDArray[Any]
Targets = npt.NDArray[Any]  # see `Split.targets`

_ROWS = 1024  # images of an array that are hashed at a time


class Split:
    """One split of a data set: images and their targets, indexed by number. The base of every kind of split."""

    streamed: ClassVar[bool] = False  # images are read in sequence, so that to read one is to read those before it

    if TYPE_CHECKING:  # a field or a property of every split; at run time it would be the default of a field

        @property
        def targets(self) -> Targets:
            """The targets of all images, in the form of the data's task.

            Multi-class: class indices, (N,) int64. Multi-label: 0 or 1 per label, (N, K) float32. Regression: values,
            (N, K) float32. Without labels: (N, 0) float32. Annotations, such as masks and boxes: (N,) objects.
            """

    def __len__(self) -> int:
        raise NotImplementedError

    def image(self, i: int) -> Pixels:
        """Image `i` as stored, (H, W, C): uint8, uint16 or float32."""
        raise NotImplementedError

    def name(self, i: int) -> str:
        """The name of image `i`: its path, or e.g. "digits/train/17"."""
        raise NotImplementedError

    def version(self) -> str | None:
        """Changes when any image does; None if that cannot be known."""
        return None

    def read_as(self, channels: int, bits: int) -> Split:  # noqa: ARG002  # arrays are converted when preprocessed
        """The same images, decoded with other channels and bits."""
        return self

    def reduced(self, min_side: int) -> Split:  # noqa: ARG002  # only files can be decoded at a reduced size
        """The same images, decoded at a reduced size where that is faster, with no side below `min_side`."""
        return self

    def reader(self, wanted: Numbers) -> Split:  # noqa: ARG002  # only a stream must know
        """The split prepared to read these images, each once and roughly in this order."""
        return self

    def order(self, rng: np.random.Generator) -> Numbers:
        """A random order for an epoch."""
        return rng.permutation(len(self))

    def arranged(self, numbers: Numbers, rng: np.random.Generator) -> Numbers:  # noqa: ARG002  # only shards differ
        """Images drawn in random order, in a random order that suits the storage."""
        return numbers

    def grouped(self, order: Numbers, size: int) -> Numbers:  # noqa: ARG002  # only shards differ
        """The order of an epoch with each batch of `size` sorted, so that a part of every batch needs few shards."""
        return order

    def digest(self) -> str | None:
        """Changes with the names, the order or the content of the images; None if that would have to be read."""
        return None

    def source(self, i: int) -> Path | Callable[[], Pixels | bytes]:
        """Image `i` in its most original form: a file, or a function that gives its content or pixels."""
        return partial(self.image, i)


@dataclass(frozen=True, eq=False)
class FileSplit(Split):
    """Image files, read on access."""

    paths: Sequence[Path]
    targets: Targets
    channels: int
    bits: int = 8
    min_side: int | None = None  # as in `read_image`

    def __len__(self) -> int:
        return len(self.paths)

    def image(self, i: int) -> Pixels:
        return read_image(self.paths[i], self.channels, self.bits, self.min_side)

    def name(self, i: int) -> str:
        return str(self.paths[i])

    def version(self) -> str:
        return files_version(self.paths)

    def read_as(self, channels: int, bits: int) -> Split:
        return replace(self, channels=channels, bits=bits)

    def reduced(self, min_side: int) -> Split:
        return replace(self, min_side=min_side)

    def source(self, i: int) -> Path:
        return self.paths[i]


class Store(Protocol):
    """Random access to the encoded images of one split."""

    def read(self, row: int) -> bytes:
        """The encoded image, as in a file; raises UnreadableImage."""

    def name(self, row: int) -> str: ...

    def version(self) -> str | None:
        """A hash that changes whenever one of the images does; None if changes cannot be detected."""


@dataclass(frozen=True, eq=False)
class PackedSplit(Split):
    """Rows of a `Store`, read on access."""

    store: Store
    rows: Numbers
    targets: Targets
    channels: int
    bits: int = 8
    min_side: int | None = None  # as in `read_image`

    def __len__(self) -> int:
        return len(self.rows)

    def image(self, i: int) -> Pixels:
        return read_image(self.content(i), self.channels, self.bits, self.min_side)

    def content(self, i: int) -> bytes:
        """The encoded image `i`."""
        return self.store.read(int(self.rows[i]))

    def name(self, i: int) -> str:
        return self.store.name(int(self.rows[i]))

    def read_as(self, channels: int, bits: int) -> Split:
        return replace(self, channels=channels, bits=bits)

    def reduced(self, min_side: int) -> Split:
        return replace(self, min_side=min_side)

    def source(self, i: int) -> Callable[[], bytes]:
        return partial(self.content, i)

    def version(self) -> str | None:
        version = self.store.version()
        return None if version is None else version + hashlib.blake2b(self.rows.tobytes(), digest_size=16).hexdigest()


def files_version(paths: Iterable[Path]) -> str:
    """A hash of the files' paths, sizes and modification times."""
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        stat = path.stat()
        digest.update(f"{path.absolute()}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class ArraySplit(Split):
    """Images of equal size in memory: (N, H, W, C) uint8, uint16 or float32."""

    pixels: Pixels
    targets: Targets
    title: str

    def __len__(self) -> int:
        return len(self.pixels)

    def image(self, i: int) -> Pixels:
        image: Pixels = self.pixels[i]
        return image

    def take(self, numbers: Numbers) -> Pixels:
        """Several images at once, (N, H, W, C)."""
        return self.pixels[numbers]

    def version(self) -> str:
        return _pixels_version(self)

    def name(self, i: int) -> str:
        return f"{self.title}/{i}"


@dataclass(frozen=True, eq=False)
class MappedSplit(Split):
    """Images of equal size in a memory-mapped file: rows of an (N, H, W, C) array, read on access."""

    pixels: Pixels
    rows: Numbers
    targets: Targets
    title: str

    def __len__(self) -> int:
        return len(self.rows)

    def image(self, i: int) -> Pixels:
        return np.asarray(check_mapped(self.pixels)[self.rows[i]])

    def take(self, numbers: Numbers) -> Pixels:
        """Several images at once, (N, H, W, C)."""
        return np.asarray(check_mapped(self.pixels)[self.rows[numbers]])

    def version(self) -> str:
        return _pixels_version(self)

    def name(self, i: int) -> str:
        return f"{self.title}/{self.rows[i]}"


def _pixels_version(split: ArraySplit | MappedSplit) -> str:
    """A hash of all pixels, some rows at a time."""
    kind = f"{split.pixels.dtype} {split.pixels.shape[1:]}"
    digest = hashlib.blake2b(kind.encode(), digest_size=16)
    for at in range(0, len(split), _ROWS):
        rows = np.arange(at, min(at + _ROWS, len(split)))
        digest.update(np.ascontiguousarray(split.take(rows)).data)
    return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class Subset(Split):
    """A split of some images of another, with their targets or other ones."""

    whole: Split
    numbers: Numbers
    labels: Targets | None = None

    @property
    def targets(self) -> Targets:
        return self.whole.targets[self.numbers] if self.labels is None else self.labels

    def __len__(self) -> int:
        return len(self.numbers)

    def image(self, i: int) -> Pixels:
        return self.whole.image(int(self.numbers[i]))

    def name(self, i: int) -> str:
        return self.whole.name(int(self.numbers[i]))

    def version(self) -> str | None:
        version = self.whole.version()
        return (
            None if version is None else version + hashlib.blake2b(self.numbers.tobytes(), digest_size=16).hexdigest()
        )

    def read_as(self, channels: int, bits: int) -> Split:
        return replace(self, whole=self.whole.read_as(channels, bits))

    def reduced(self, min_side: int) -> Split:
        return replace(self, whole=self.whole.reduced(min_side))

    def reader(self, wanted: Numbers) -> Split:
        return replace(self, whole=self.whole.reader(self.numbers[wanted % len(self)]))

    def source(self, i: int) -> Path | Callable[[], Pixels | bytes]:
        return self.whole.source(int(self.numbers[i]))


def choose(images: int, most: int, seed: int = 0) -> Numbers:
    """Indices of all images, or of a random sample of `most`, in order."""
    if images <= most:
        return np.arange(images)
    return np.sort(np.random.default_rng(seed).choice(images, most, replace=False))


@dataclass(frozen=True)
class Data:
    """A data set, opened, verified and split."""

    name: str  # short, for run folders
    task: Task
    splits: Mapping[str, Split]  # "train", "val", and "test" where there is one
    size: tuple[int, int]  # height and width: of the array, or the medians over all files
    channels: int  # 1 if all images are grayscale, 3 if some are colour, else the number of bands
    unreadable: tuple[tuple[str, str], ...]  # (file, reason) of the images that were skipped
    bits: int = 8  # bit depth: 8, 16, or 32 for floats

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, labels or values."""
        return self.task.classes

    def fingerprint(self) -> str:
        """Changes when the classes, the labels or the number of images change."""
        digest = hashlib.sha256("\n".join(self.classes).encode())
        for name, split in self.splits.items():
            # Targets of images without labels have no bytes.
            digest.update(name.encode() + (target_bytes(split.targets) or str(len(split)).encode()))
        return digest.hexdigest()

    def read_as(self, channels: int, bits: int) -> Data:
        """The same images, converted on reading to the channels and bit depth that a model expects."""
        possible = (1, 3, 4) if self.channels in (1, 3) else (self.channels,)
        if channels not in possible:
            raise UserError(
                f"The images of {self.name} have {self.channels} channels and cannot be converted to {channels}: "
                f"'channels' must be {' or '.join(map(str, possible))}."
            )
        if (bits == 32) != (self.bits == 32):
            raise UserError(
                f"The images of {self.name} are {BIT_DEPTHS[self.bits]} and cannot be converted to "
                f"{BIT_DEPTHS[bits]}: 'bits' must be {'32' if self.bits == 32 else '8 or 16'}."
            )
        splits = {name: split.read_as(channels, bits) for name, split in self.splits.items()}
        return replace(self, splits=splits)


def annotated(targets: Targets) -> bool:
    """Whether targets are annotations: objects such as masks and boxes, which move with the pixels."""
    return bool(targets.dtype == object)


def target_bytes(targets: Targets) -> bytes:
    """The content of targets, to hash; of an annotation that is no array, its `repr`."""
    if not annotated(targets):
        return targets.tobytes()
    return b"\0".join(
        each.tobytes() if isinstance(each, np.ndarray) else repr(each).encode(errors="surrogateescape")  # file names
        for each in targets
    )


@dataclass(frozen=True)
class Problem:
    """What is wrong with an annotation and was repaired or left out, for the audit."""

    kind: str  # a key of `audit.findings.KINDS`
    detail: str
    file: str  # of the annotation


@dataclass(frozen=True)
class Found:
    """The content of a source, before a validation split is held out."""

    name: str
    task: Task
    parts: dict[str, tuple[Array, Targets]]  # by split: items (paths, pixels or global rows) and targets
    make: Callable[[str, Array, Targets], Split]
    size: tuple[int, int]
    channels: int
    unreadable: tuple[tuple[str, str], ...] = ()
    bits: int = 8
    problems: tuple[Problem, ...] = ()  # of annotations

    @property
    def classes(self) -> tuple[str, ...]:
        return self.task.classes

    def without_labels(self, task: Task) -> Found:
        """The same images for a task that reads no labels."""
        parts: dict[str, tuple[Array, Targets]] = {
            split: (items, np.zeros((len(items), 0), np.float32)) for split, (items, _) in self.parts.items()
        }
        return replace(self, task=task, parts=parts)


def reads_labels(task: type[Task] | None) -> bool:
    """Whether labels are read; a task that is not given is inferred from them.

    For a task that reads none, openers give all images the label "", and `open_source` drops it.
    """
    return task is None or task.labelled
