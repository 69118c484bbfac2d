"""Images that are decoded once, not in every epoch.

What is kept are pixels in a memory-mapped file: where nothing is cropped at random the model's own, so that an
epoch only gathers rows; else the images as they are read, from which every epoch cuts its crops. Kept or read
anew, the pixels are the same, so a cache changes how long a run takes and nothing else.

A cache is a folder, named after all that its pixels depend on: the version of the images, which for files is the path,
size and time of each, and the preprocessing. It is written under another name and renamed when it is whole, so that
two runs at once do not meet. Before one is written, those longest unused are removed until all together are within
the budget.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from vitrail.data.dataset import ArraySplit, FileSplit, MappedSplit, Numbers, PackedSplit, Split
from vitrail.data.download import cache_folder
from vitrail.data.images import Pixels
from vitrail.data.loader import ReadySplit, batches, images
from vitrail.data.preprocess import Preprocess
from vitrail.progress import log, track

_VERSION = 1  # of the pixels: to be raised when images are decoded or resized in another way
_IN_MEMORY = 2 * 2**30  # bytes of resized arrays that a split may take
_FREE = 2**30  # bytes of the disk that are left to others
_BATCH = 256
Files = FileSplit | PackedSplit  # what has to be decoded, and is always the same

_PIXELS, _TABLE = "pixels", "table.npy"


@dataclass(frozen=True, eq=False)
class KeptSplit(Split):
    """A split whose images lie one after the other in one array of bytes."""

    split: Split
    pixels: Pixels
    table: Numbers  # (N, 4): where an image begins, its height, width and channels

    @property
    def targets(self) -> Numbers:
        return self.split.targets

    def __len__(self) -> int:
        return len(self.split)

    def image(self, i: int) -> Pixels:
        start, h, w, c = self.table[i].tolist()
        image: Pixels = self.pixels[start : start + h * w * c].reshape(h, w, c)
        return image

    def name(self, i: int) -> str:
        return self.split.name(i)


def once(split: Split, preprocess: Preprocess, crops: bool, gigabytes: float, workers: int = 2) -> Split:
    """A split that gives the pixels of `split` without reading them again in every epoch, where it can.

    With random crops, images of more than twice the model's size are read in small, cache or not.
    """
    if isinstance(split, ArraySplit | MappedSplit):
        return split if crops else _resized(split, preprocess)
    if not isinstance(split, FileSplit | PackedSplit) or preprocess.bits > 8:
        return split
    if crops:
        split = replace(split, min_side=2 * max(preprocess.img_size))
    if gigabytes == 0:
        return split
    try:
        if (version := split.version()) is None:
            return split
        folder = root() / _key(split, version, preprocess, crops)
        return _opened(folder, split, preprocess, crops) or _made(folder, split, preprocess, crops, gigabytes, workers)
    except OSError as error:
        log.warning(f"Images are read anew in every epoch: they cannot be kept in {root()} ({error.strerror}).")
        return split


def root() -> Path:
    """Where caches lie."""
    return cache_folder() / "images"


def _resized(split: ArraySplit | MappedSplit, preprocess: Preprocess) -> Split:
    shape = len(split), preprocess.channels, *preprocess.img_size
    if preprocess.keeps(split.pixels) or math.prod(shape) * np.dtype(preprocess.dtype).itemsize > _IN_MEMORY:
        return split
    pixels = np.empty(shape, dtype=preprocess.dtype)
    for at in range(0, len(split), _BATCH):
        pixels[at : at + _BATCH] = preprocess.pixels(split.take(np.arange(at, min(at + _BATCH, len(split)))))
    return ReadySplit(split, preprocess, pixels)


def _opened(folder: Path, split: Files, preprocess: Preprocess, crops: bool) -> Split | None:
    """The split with its cache, if there is one."""
    if not folder.is_dir():
        return None
    os.utime(folder / _PIXELS)  # it is in use
    try:
        # Copy on write, for torch wants arrays that it may write to.
        pixels = np.asarray(np.memmap(folder / _PIXELS, dtype=np.uint8, mode="c"))
        if not crops:
            return ReadySplit(split, preprocess, pixels.reshape(len(split), preprocess.channels, *preprocess.img_size))
        table = np.load(folder / _TABLE)
        if table[-1, 0] + table[-1, 1:].prod() == len(pixels):
            return KeptSplit(split, pixels, table)
    except (ValueError, EOFError):
        pass
    shutil.rmtree(folder)  # damaged: it is made anew
    return None


def _made(folder: Path, split: Files, preprocess: Preprocess, crops: bool, gigabytes: float, workers: int) -> Split:
    """The split with a cache that is made now, if it fits; else the split itself."""
    place, size = folder.parent, _size(split, preprocess, crops, workers)
    if size > gigabytes * 2**30:
        log.info(
            f"Images are read anew in every epoch: keeping them would take {size / 2**30:.1f} GiB, "
            f"more than --cache-gb {gigabytes:g}."
        )
        return split
    place.mkdir(parents=True, exist_ok=True)
    _make_room(place, gigabytes * 2**30 - size)
    if shutil.disk_usage(place).free < size + _FREE:
        log.warning(f"Images are read anew in every epoch: {place} has no {size / 2**30:.1f} GiB left to keep them.")
        return split
    unfinished = Path(tempfile.mkdtemp(dir=place, prefix="unfinished-"))
    try:
        shapes = []
        with (unfinished / _PIXELS).open("wb") as file:
            for image in track(_kept(split, preprocess, crops, workers), "decoding once", len(split), "img"):
                file.write(image.data)
                shapes.append(image.shape)
            file.flush()
            os.fsync(file.fileno())
        if crops:
            starts = np.cumsum([0, *(math.prod(shape) for shape in shapes)])[:-1]
            np.save(unfinished / _TABLE, np.column_stack([starts, shapes]))
        try:
            unfinished.rename(folder)
        except OSError:  # another run was faster, and its pixels are the same
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return _opened(folder, split, preprocess, crops) or split


def _kept(split: Files, preprocess: Preprocess, crops: bool, workers: int) -> Iterator[Pixels]:
    """What is written for every image, in order."""
    if crops:
        yield from images(split, workers)
    else:
        for pixels, _ in batches(split, preprocess, _BATCH, workers):
            yield from pixels.numpy()


def _key(split: Files, version: str, preprocess: Preprocess, crops: bool) -> str:
    """Changes with everything that the pixels depend on."""
    what: tuple[object, ...] = split.min_side, split.channels
    if not crops:
        what = preprocess.img_size, preprocess.channels, preprocess.crop, preprocess.interpolation
    return hashlib.blake2b(repr((_VERSION, crops, what, version)).encode(), digest_size=16).hexdigest()


def _size(split: Files, preprocess: Preprocess, crops: bool, workers: int) -> int:
    """How many bytes a cache takes: where the images are of any size, as some of them tell."""
    if not crops:
        return len(split) * preprocess.channels * math.prod(preprocess.img_size)
    some = range(0, len(split), max(len(split) // 64, 1))
    return sum(image.size for image in images(split, workers, some)) * len(split) // len(some)


def _make_room(place: Path, budget: float) -> None:
    """Removes the caches that were longest unused until all together take no more than the budget."""
    caches = [(file.stat().st_mtime, file.stat().st_size, file.parent) for file in place.glob(f"*/{_PIXELS}")]
    total = sum(size for _, size, _ in caches)
    for _, size, folder in sorted(caches):
        if total > budget:
            shutil.rmtree(folder, ignore_errors=True)  # a run that still reads it keeps what it has open
            total -= size
