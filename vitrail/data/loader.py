"""Batches of pixels, in order for evaluation and shuffled for training.

There is no `DataLoader`: decoders and torch release the interpreter's lock while they work, so threads
suffice; they start at once and nothing has to be pickled. Whatever is random depends on the seed, the epoch
and the number of the image alone, so a run that resumes in the middle of an epoch sees the batches that it
would have seen.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from vitrail.data.balance import balanced_order
from vitrail.data.dataset import ArraySplit, MappedSplit, Numbers, Split
from vitrail.data.images import Pixels, UnreadableImage
from vitrail.data.preprocess import Preprocess
from vitrail.data.stream import StreamSplit
from vitrail.errors import UserError

Batch = tuple[Tensor, Tensor]  # pixels B C H W, uint8 or float32 for deep ones; int64 targets B
Box = tuple[int, int, int, int]  # y, x, h, w

_AHEAD = 4  # batches that are read before they are asked for
_CHUNK = 16  # images that a thread reads at a time, so that threads share a batch at little cost for each image


@dataclass(frozen=True, eq=False)
class ReadySplit:
    """A split whose pixels were made ready once: (N, C, h, w) uint8, as `preprocess` makes them."""

    split: Split
    preprocess: Preprocess
    pixels: Pixels

    @property
    def targets(self) -> Numbers:
        return self.split.targets

    def __len__(self) -> int:
        return len(self.split)

    def image(self, i: int) -> Pixels:
        return self.split.image(i)

    def name(self, i: int) -> str:
        return self.split.name(i)


def batches(
    split: Split,
    preprocess: Preprocess,
    batch_size: int,
    workers: int = 2,
    indices: Sequence[int] | None = None,
) -> Iterator[Batch]:
    """All images of a split, or those numbered `indices`, in order; the last batch may be smaller."""
    order = np.arange(len(split)) if indices is None else np.asarray(indices, dtype=np.int64)
    return _read(split, preprocess, _cut(order, batch_size), workers)


def images(split: Split, workers: int = 2, indices: Sequence[int] | None = None) -> Iterator[Pixels]:
    """All images of a split, or those numbered `indices`, as they are stored, in order."""
    order = range(len(split)) if indices is None else indices
    with ThreadPoolExecutor(max(workers, 1), thread_name_prefix="vitrail-read") as pool:
        for at in range(0, len(order), _AHEAD * _CHUNK):
            yield from pool.map(partial(_image, split), order[at : at + _AHEAD * _CHUNK])


@dataclass(frozen=True)
class TrainBatches:
    """The shuffled batches of every epoch. Batch k of epoch e is the same whatever was read before."""

    split: Split
    preprocess: Preprocess
    batch_size: int
    seed: int
    crop_scale: float = 1.0  # smallest share of the area that a random crop keeps; 1 = no random crop
    workers: int = 2
    balanced: bool = False  # every class equally often, in as many batches

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise UserError(f"'batch_size' must be 1 or more, but it is {self.batch_size}.")
        if not 0 < self.crop_scale <= 1:
            raise UserError(f"'crop_scale' must be above 0 and at most 1, but it is {self.crop_scale}.")

    def __len__(self) -> int:
        """Batches in an epoch: full ones, or a single one of all images if there are fewer than a batch."""
        return max(len(self.split) // self.batch_size, 1)

    def numbers(self, number: int, start: int = 0) -> list[Numbers]:
        """Which images the batches of an epoch hold, from batch `start` on; `i + r * N` is image `i` once more."""
        rng = np.random.Generator(np.random.PCG64([self.seed, number]))
        split = self.split
        if self.balanced:
            order = balanced_order(split.targets, self.seed, number)
        else:
            order = split.order(rng) if isinstance(split, StreamSplit) else rng.permutation(len(split))
        return _cut(order, self.batch_size)[start : len(self)]

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from batch `start` on; none before it is read."""
        return self.read(number, self.numbers(number, start))

    def read(self, number: int, chosen: Sequence[Numbers]) -> Iterator[Batch]:
        """The batches of an epoch that hold these images, as `numbers` gives them."""

        def crop(i: int, height: int, width: int) -> Box:
            # From 1, because a seed of (seed, epoch, 0) is that of the shuffle: numpy pads seeds with zeros.
            rng = np.random.Generator(np.random.PCG64([self.seed, number, 1 + i]))
            return random_crop(height, width, self.crop_scale, rng)

        return _read(self.split, self.preprocess, chosen, self.workers, crop if self.crop_scale < 1 else None)


def random_crop(height: int, width: int, scale: float, rng: np.random.Generator) -> Box:
    """A box of `scale` to 1 of the area and an aspect of 3/4 to 4/3, as torchvision's RandomResizedCrop."""
    narrow, wide = 3 / 4, 4 / 3
    for _ in range(10):
        area = height * width * rng.uniform(scale, 1)
        aspect = math.exp(rng.uniform(math.log(narrow), math.log(wide)))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1)), h, w
    h = min(height, round(width / narrow))
    w = min(width, round(height * wide))
    return (height - h) // 2, (width - w) // 2, h, w


def _cut(order: Numbers, size: int) -> list[Numbers]:
    return [order[at : at + size] for at in range(0, len(order), size)]


def _image(split: Split, i: int) -> Pixels:
    try:
        return split.image(i)
    except UnreadableImage as error:
        raise UserError(f"{split.name(i)} was checked before but cannot be read now: {error}.") from error


def _ready(split: Split, preprocess: Preprocess) -> Callable[[Numbers], Pixels] | None:
    """What gives the pixels of images, (N, C, h, w), by their numbers, if nothing has to be done to them."""
    if isinstance(split, ReadySplit) and split.preprocess == preprocess:
        return split.pixels.__getitem__
    if isinstance(split, ArraySplit | MappedSplit) and preprocess.keeps(split.pixels):
        return lambda numbers: split.take(numbers).transpose(0, 3, 1, 2).astype(preprocess.dtype, copy=False)
    return None


def _read(
    split: Split,
    preprocess: Preprocess,
    chosen: Sequence[Numbers],
    workers: int,
    crop: Callable[[int, int, int], Box] | None = None,
) -> Iterator[Batch]:
    """Batches of images; number `i + r * N` is image `i` once more, with a crop of its own."""
    if crop is None and (ready := _ready(split, preprocess)) is not None:
        for numbers in chosen:
            which = numbers % len(split)
            yield torch.from_numpy(np.ascontiguousarray(ready(which))), torch.from_numpy(split.targets[which])
        return
    if isinstance(split, StreamSplit) and chosen:
        split = split.reading(np.concatenate(chosen))

    def fill(out: Pixels, numbers: Numbers) -> None:
        for row, number in zip(out, numbers.tolist(), strict=True):
            image = _image(split, number % len(split))
            if crop is None:
                row[:] = preprocess.pixels(image)
            else:
                row[:] = preprocess.crop_pixels(image, crop(number, *image.shape[:2]))

    pool = ThreadPoolExecutor(max(workers, 1), thread_name_prefix="vitrail-read")

    def begin(numbers: Numbers) -> tuple[Pixels, Numbers, list[Future[None]]]:
        out = np.empty((len(numbers), preprocess.channels, *preprocess.img_size), dtype=preprocess.dtype)
        chunks = [slice(at, at + _CHUNK) for at in range(0, len(numbers), _CHUNK)]
        return out, numbers, [pool.submit(fill, out[chunk], numbers[chunk]) for chunk in chunks]

    try:
        reading = deque(begin(numbers) for numbers in chosen[:_AHEAD])
        for k in range(len(chosen)):
            out, numbers, tasks = reading.popleft()
            for task in tasks:
                task.result()
            if k + _AHEAD < len(chosen):
                reading.append(begin(chosen[k + _AHEAD]))
            yield torch.from_numpy(out), torch.from_numpy(split.targets[numbers % len(split)])
    finally:
        pool.shutdown(cancel_futures=True)
