"""Batches of pixels, in order for evaluation and shuffled for training.

Threads instead of a `DataLoader`: decoders and torch release the GIL, threads start at once, and nothing has to be
pickled. All randomness depends on the seed, the epoch and the image number only, so a run resumed in mid-epoch gets
exactly the batches it would have got.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.data.balance import balanced_order
from vitrail.data.dataset import Array, ArraySplit, MappedSplit, Numbers, Split, annotated
from vitrail.data.images import Pixels, UnreadableImage
from vitrail.data.npy import check_mapped
from vitrail.data.preprocess import Preprocess
from vitrail.errors import UserError
from vitrail.tasks import Task
from vitrail.tasks.placement import Placement, Truth, drawn

if TYPE_CHECKING:
    from torch import Tensor

# Pixels B C H W, uint8 or (above 8 bits) float32, and targets: a tensor, or in evaluation an array of `Truth`.
Batch = tuple["Tensor", Any]
Box = tuple[int, int, int, int]  # y, x, h, w

_PREFETCH = 4  # batches
_CHUNK = 16  # images that a thread reads at a time


@dataclass(frozen=True, eq=False)
class DecodedSplit(Split):
    """A split with pixels that need not be decoded again. The order of its epochs is the same."""

    split: Split
    pixels: Pixels

    @property
    def targets(self) -> Numbers:
        return self.split.targets

    def __len__(self) -> int:
        return len(self.split)

    def image(self, i: int) -> Pixels:
        return self.split.image(i)

    def stored(self) -> Pixels:
        """The pixels, unless they are in a file that has become shorter."""
        return np.asarray(check_mapped(self.pixels, "Run the command again: it renews the cache."))

    def name(self, i: int) -> str:
        return self.split.name(i)

    def order(self, rng: np.random.Generator) -> Numbers:
        return self.split.order(rng)

    def arranged(self, numbers: Numbers, rng: np.random.Generator) -> Numbers:
        return self.split.arranged(numbers, rng)

    def grouped(self, order: Numbers, size: int) -> Numbers:
        return self.split.grouped(order, size)


@dataclass(frozen=True, eq=False)
class ReadySplit(DecodedSplit):
    """A split with preprocessed pixels, (N, C, h, w), as `preprocess` produces them."""

    preprocess: Preprocess


def batches(
    split: Split,
    preprocess: Preprocess,
    batch_size: int,
    workers: int = 2,
    indices: Sequence[int] | None = None,
) -> Iterator[Batch]:
    """The images of a split, or those at `indices`, in order; the last batch may be smaller.

    Targets are a tensor; for annotations, an array of `Truth`.
    """
    order = np.arange(len(split)) if indices is None else np.asarray(indices, dtype=np.int64)
    return _read(split, preprocess, _cut(order, batch_size), workers)


def images(split: Split, workers: int = 2, indices: Sequence[int] | None = None) -> Iterator[Pixels]:
    """The images of a split, or those at `indices`, in order and without preprocessing."""
    order = range(len(split)) if indices is None else indices
    with ThreadPoolExecutor(max(workers, 1), thread_name_prefix="vitrail-read") as pool:
        for at in range(0, len(order), _PREFETCH * _CHUNK):
            yield from pool.map(partial(image_of, split), order[at : at + _PREFETCH * _CHUNK])


@dataclass(frozen=True)
class TrainBatches:
    """Shuffled batches for training. Batch k of epoch e does not depend on what was read before."""

    split: Split
    preprocess: Preprocess
    batch_size: int
    seed: int
    crop_scale: float = 1.0  # smallest fraction of the area that a random crop keeps; 1 = no random crop
    workers: int = 2
    balanced: bool = False  # class-balanced sampling, with the same number of batches
    repeats: int = 1  # copies of each image, with the same number of batches: repeated augmentation
    change: Callable[[Tensor], Tensor] | None = None  # the caller's augmentation of pixels
    task: Task | None = None  # of annotated images: it places annotations into the input, with the pixels
    hflip: float = 0.0  # probability of mirroring an annotated image; others are mirrored batch by batch

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise UserError(f"'batch_size' must be 1 or more, but it is {self.batch_size}.")
        if not 0 < self.crop_scale <= 1:
            raise UserError(f"'crop_scale' must be greater than 0 and at most 1, but it is {self.crop_scale}.")

    def __len__(self) -> int:
        """Batches per epoch. The last, incomplete one is dropped unless it is the only one."""
        return max(len(self.split) // self.batch_size, 1)

    def normalise(self, pixels: Tensor) -> Tensor:
        """Pixels (B, C, H, W) as the model's input, after the caller's augmentation."""
        return self.preprocess.normalise(pixels if self.change is None else self.change(pixels))

    def numbers(self, number: int, start: int = 0) -> list[Numbers]:
        """The image numbers of an epoch's batches, from batch `start`; `i + r * N` is the r-th repetition of `i`."""
        rng = np.random.Generator(np.random.PCG64([self.seed, number]))
        split = self.split
        if self.balanced:
            order = split.arranged(balanced_order(split.targets, self.seed, number), rng)
        else:
            order = split.order(rng)
        if self.repeats > 1:
            few = order[: math.ceil(len(order) / self.repeats)]
            order = (few[:, None] + len(split) * np.arange(self.repeats)).ravel()[: len(order)]
        return _cut(split.grouped(order, self.batch_size), self.batch_size)[start : len(self)]

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from batch `start`; earlier ones are not read."""
        return self.read(number, self.numbers(number, start))

    def read(self, number: int, chosen: Sequence[Numbers]) -> Iterator[Batch]:
        """The batches of an epoch that hold these images, as `numbers` gives them."""

        def chance(i: int) -> np.random.Generator:
            # From 1: numpy pads seeds with zeros, so (seed, epoch, 0) is the seed of the shuffle.
            return np.random.Generator(np.random.PCG64([self.seed, number, 1 + i]))

        def crop(i: int, height: int, width: int) -> Box:
            return random_crop(height, width, self.crop_scale, chance(i))

        def place(i: int, height: int, width: int) -> Placement:
            return drawn((height, width), self.preprocess.img_size, self.crop_scale, self.hflip, chance(i))

        if self.task is not None:
            return _read_annotated(self.split, self.preprocess, chosen, self.workers, place, self.task)
        return _read(self.split, self.preprocess, chosen, self.workers, crop if self.crop_scale < 1 else None)


def random_crop(height: int, width: int, scale: float, rng: np.random.Generator) -> Box:
    """A box of `scale` to 1 of the area and an aspect ratio of 3/4 to 4/3, as in torchvision's RandomResizedCrop."""
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


def image_of(split: Split, i: int) -> Pixels:
    """An image of a split, which was readable when the split was opened."""
    try:
        return split.image(i)
    except UnreadableImage as error:
        raise UserError(f"{split.name(i)} was readable before but is no longer: {error}.") from error


def _preprocessed(split: Split, preprocess: Preprocess) -> Callable[[Numbers], Pixels] | None:
    """A function from image numbers to pixels (N, C, h, w), if the split needs no further preprocessing."""
    if isinstance(split, ReadySplit) and split.preprocess == preprocess:
        return lambda numbers: split.stored()[numbers]
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
    """Batches of images; number `i + r * N` is the r-th repetition of image `i`, with its own crop."""
    import torch

    if annotated(split.targets):
        yield from _read_annotated(split, preprocess, chosen, workers)
        return
    if crop is None and (take := _preprocessed(split, preprocess)) is not None:
        for numbers in chosen:
            indices = numbers % len(split)
            yield torch.from_numpy(np.ascontiguousarray(take(indices))), torch.from_numpy(split.targets[indices])
        return
    if chosen:
        split = split.reader(np.concatenate(chosen) % len(split))

    def fill(out: Pixels, _: Array, numbers: Numbers) -> None:
        for row, number in zip(out, numbers.tolist(), strict=True):
            image = image_of(split, number % len(split))
            if crop is None:
                row[:] = preprocess.pixels(image)
            else:
                row[:] = preprocess.crop_pixels(image, crop(number, *image.shape[:2]))

    for pixels, _, numbers in _filled(fill, preprocess, chosen, workers):
        yield torch.from_numpy(pixels), torch.from_numpy(split.targets[numbers % len(split)])


def _read_annotated(
    split: Split,
    preprocess: Preprocess,
    chosen: Sequence[Numbers],
    workers: int,
    place: Callable[[int, int, int], Placement] | None = None,
    task: Task | None = None,
) -> Iterator[Batch]:
    """`_read` for annotated images: with `place`, targets are annotations as a task places them; else `Truth`."""
    import torch

    if chosen:
        split = split.reader(np.concatenate(chosen) % len(split))

    def fill(out: Pixels, targets: Array, numbers: Numbers) -> None:
        for k, (row, number) in enumerate(zip(out, numbers.tolist(), strict=True)):
            i = number % len(split)
            image = image_of(split, i)
            if place is None or task is None:
                row[:] = preprocess.pixels(image)
                targets[k] = Truth(split.targets[i], preprocess.placement(*image.shape[:2]))
            else:
                placement = place(number, *image.shape[:2])
                row[:] = preprocess.place(image, placement)
                targets[k] = task.placed(split.targets[i], placement)

    for pixels, targets, _ in _filled(fill, preprocess, chosen, workers):
        yield torch.from_numpy(pixels), targets if task is None else torch.from_numpy(np.stack(list(targets)))


def _filled(
    fill: Callable[[Pixels, Array, Numbers], None], preprocess: Preprocess, chosen: Sequence[Numbers], workers: int
) -> Iterator[tuple[Pixels, Array, Numbers]]:
    """Batches of pixels and of any objects, filled by threads some batches ahead, with their image numbers."""
    pool = ThreadPoolExecutor(max(workers, 1), thread_name_prefix="vitrail-read")

    def submit(numbers: Numbers) -> tuple[Pixels, Array, Numbers, list[Future[None]]]:
        out = np.empty((len(numbers), preprocess.channels, *preprocess.img_size), dtype=preprocess.dtype)
        extra = np.empty(len(numbers), object)
        chunks = [slice(at, at + _CHUNK) for at in range(0, len(numbers), _CHUNK)]
        return out, extra, numbers, [pool.submit(fill, out[c], extra[c], numbers[c]) for c in chunks]

    try:
        pending = deque(submit(numbers) for numbers in chosen[:_PREFETCH])
        for k in range(len(chosen)):
            out, extra, numbers, futures = pending.popleft()
            for future in futures:
                future.result()
            if k + _PREFETCH < len(chosen):
                pending.append(submit(chosen[k + _PREFETCH]))
            yield out, extra, numbers
    finally:
        pool.shutdown(cancel_futures=True)
