"""The cache of decoded images, so that they are not decoded in every epoch.

It holds pixels in a memory-mapped file: without random crops, those of the model's input, so that an epoch only gathers
rows; otherwise the decoded images, which every epoch crops. Cached or not, the pixels are the same, so a cache affects
only the speed of a run.

A cache is a folder, named after a hash of everything its pixels depend on: the preprocessing and the version of the
images, for files the path, size and modification time of each. It is written under a temporary name and renamed when
complete, so that concurrent runs do not interfere. Before one is written, the least recently used ones are removed
until all fit into the budget.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from vitrail.data.dataset import ArraySplit, FileSplit, MappedSplit, Numbers, PackedSplit, Split, annotated
from vitrail.data.download import cache_folder
from vitrail.data.images import Pixels
from vitrail.data.loader import DecodedSplit, ReadySplit, batches, images
from vitrail.data.preprocess import Preprocess
from vitrail.files import atomic_folder, open_regular
from vitrail.progress import log, track

_VERSION = 1  # increase when images are decoded or resized differently
_IN_MEMORY = 2 * 2**30  # bytes of resized arrays per split
_FREE = 2**30  # bytes of disk space to leave free
_BATCH = 256
Files = FileSplit | PackedSplit  # splits that are decoded, with fixed content

_PIXELS, _TABLE = "pixels", "table.npy"


@dataclass(frozen=True, eq=False)
class KeptSplit(DecodedSplit):
    """A split whose images are stored in one byte array."""

    table: Numbers  # (N, 4): offset, height, width and channels of each image

    def image(self, i: int) -> Pixels:
        start, h, w, c = self.table[i].tolist()
        image: Pixels = self.stored()[start : start + h * w * c].reshape(h, w, c)
        return image


def once(split: Split, preprocess: Preprocess, crops: bool, gigabytes: float, workers: int = 2) -> Split:
    """A split with the pixels of `split` that does not decode them again in every epoch, if possible.

    With random crops, images more than twice the model's size are decoded at a reduced size, cached or not. Annotated
    images keep their size, which their annotations refer to.
    """
    whole = annotated(split.targets)
    crops = crops or whole
    if isinstance(split, ArraySplit | MappedSplit):
        return split if crops else _resized(split, preprocess)
    if not isinstance(split, FileSplit | PackedSplit) or preprocess.bits > 8:
        return split
    if crops and not whole:
        split = replace(split, min_side=2 * max(preprocess.img_size))
    if gigabytes == 0:
        return split
    try:
        if (version := split.version()) is None:
            return split
        folder = root() / _key(split, version, preprocess, crops)
        return _opened(folder, split, preprocess, crops) or _made(folder, split, preprocess, crops, gigabytes, workers)
    except OSError as error:
        log.warning(f"Images are decoded in every epoch: they cannot be cached in {root()} ({error.strerror}).")
        return split


def root() -> Path:
    """The folder of the caches."""
    return cache_folder() / "images"


def _resized(split: ArraySplit | MappedSplit, preprocess: Preprocess) -> Split:
    shape = len(split), preprocess.channels, *preprocess.img_size
    if preprocess.keeps(split.pixels) or math.prod(shape) * np.dtype(preprocess.dtype).itemsize > _IN_MEMORY:
        return split
    pixels = np.empty(shape, dtype=preprocess.dtype)
    for at in range(0, len(split), _BATCH):
        pixels[at : at + _BATCH] = preprocess.pixels(split.take(np.arange(at, min(at + _BATCH, len(split)))))
    return ReadySplit(split, pixels, preprocess)


def _opened(folder: Path, split: Files, preprocess: Preprocess, crops: bool) -> Split | None:
    """The split with its cache, if there is one."""
    if not folder.is_dir():
        return None
    with suppress(OSError):  # read-only, which does no harm, or damaged
        os.utime(folder / _PIXELS)  # mark as used
    try:
        # Copy on write: torch needs writable arrays.
        with open_regular(folder / _PIXELS) as file:
            pixels = np.memmap(file, dtype=np.uint8, mode="c")
        if not crops:
            shape = len(split), preprocess.channels, *preprocess.img_size
            return ReadySplit(split, pixels.reshape(shape), preprocess)
        with open_regular(folder / _TABLE) as file:
            table = np.load(file, allow_pickle=False)
        ends = np.cumsum(table[:, 1:].prod(axis=1))
        whole = table.shape == (len(split), 4) and (table[:, 1:] > 0).all() and ends[-1] == len(pixels)
        if whole and np.array_equal(table[:, 0], [0, *ends[:-1]]):
            return KeptSplit(split, pixels, table)
    except PermissionError:
        raise
    except Exception:  # damaged: it is recreated
        pass
    shutil.rmtree(folder)
    return None


def _made(folder: Path, split: Files, preprocess: Preprocess, crops: bool, gigabytes: float, workers: int) -> Split:
    """The split with a new cache, if it fits; otherwise the split itself."""
    place, size = folder.parent, _size(split, preprocess, crops, workers)
    if size > gigabytes * 2**30:
        log.info(
            f"Images are decoded in every epoch: caching them would take {size / 2**30:.1f} GiB, "
            f"more than --cache-gb {gigabytes:g}."
        )
        return split
    place.mkdir(parents=True, exist_ok=True)
    _make_room(place, gigabytes * 2**30 - size)
    if shutil.disk_usage(place).free < size + _FREE:
        log.warning(f"Images are decoded in every epoch: {place} has no {size / 2**30:.1f} GiB left to cache them.")
        return split
    try:
        with atomic_folder(folder) as unfinished:
            shapes = []
            with (unfinished / _PIXELS).open("wb") as file:
                for image in track(_kept(split, preprocess, crops, workers), "decoding once", len(split), "img"):
                    file.write(image.data)
                    shapes.append(image.shape)
            if crops:
                starts = np.cumsum([0, *(math.prod(shape) for shape in shapes)])[:-1]
                np.save(unfinished / _TABLE, np.column_stack([starts, shapes]))
    except FileExistsError:
        pass  # another run was faster, with the same pixels
    return _opened(folder, split, preprocess, crops) or split


def _kept(split: Files, preprocess: Preprocess, crops: bool, workers: int) -> Iterator[Pixels]:
    """The pixels to write for each image, in order."""
    if crops:
        yield from images(split, workers)
    else:
        for pixels, _ in batches(split, preprocess, _BATCH, workers):
            yield from pixels.numpy()


def _key(split: Files, version: str, preprocess: Preprocess, crops: bool) -> str:
    """A hash of everything that the pixels depend on."""
    what: tuple[object, ...] = split.min_side, split.channels
    if not crops:
        what = preprocess.img_size, preprocess.channels, preprocess.crop, preprocess.interpolation
        what += () if preprocess.fit == "crop" else (preprocess.fit,)
    return hashlib.blake2b(repr((_VERSION, crops, what, version)).encode(), digest_size=16).hexdigest()


def _size(split: Files, preprocess: Preprocess, crops: bool, workers: int) -> int:
    """The size of a cache in bytes; for images of various sizes, estimated from a sample."""
    if not crops:
        return len(split) * preprocess.channels * math.prod(preprocess.img_size)
    some = range(0, len(split), max(len(split) // 64, 1))
    return sum(image.size for image in images(split, workers, some)) * len(split) // len(some)


def _make_room(place: Path, budget: float) -> None:
    """Removes the least recently used caches until all fit into the budget."""
    caches = [(file.stat().st_mtime, file.stat().st_size, file.parent) for file in place.glob(f"*/{_PIXELS}")]
    total = sum(size for _, size, _ in caches)
    for _, size, folder in sorted(caches):
        if total > budget:
            shutil.rmtree(folder, ignore_errors=True)  # a run that still reads it keeps its open file
            total -= size
