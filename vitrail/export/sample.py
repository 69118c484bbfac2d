"""Images that exported files are verified and calibrated with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.data import Data, loader, open_data
from vitrail.data.pixels import WHITE, fit
from vitrail.errors import UserError
from vitrail.evaluate.measure import own_data, split_name
from vitrail.tasks import METHODS, task_type
from vitrail.weights import Card

Array = NDArray[Any]

_CHECK = 1000  # images compared at most
_CALIBRATE = 256  # images of a calibration
_WHOLE = 16  # images passed to a file in their own size
_RANDOM = 64
_BATCH = 32


@dataclass(frozen=True, eq=False)
class Sample:
    """Preprocessed images as training reads them, and some of the same as they are stored."""

    pixels: Array  # N C h w
    source: str  # where they are from, in words
    targets: Array | None = None  # in the classes of the model, if the data has them
    whole: list[Array] = field(default_factory=list)  # of the first images: H W C, in the model's channels and bits
    random: bool = False

    def __len__(self) -> int:
        return len(self.pixels)


def to_check(run: str | Path, card: Card, data: str | Path | None, workers: int) -> Sample:
    """Up to 1,000 validation images of `data` or of the run's own data, evenly spaced; random pixels without data."""
    try:
        opened = _opened(run, card, data)
        return _chosen(opened, split_name(opened), card, _CHECK, workers)
    except UserError as error:
        if data is not None:
            raise
        source = f"random pixels, because the run's data cannot be opened: {error}"
        return Sample(_random(card), source, random=True)


def to_calibrate(run: str | Path, card: Card, data: str | Path | None, workers: int) -> Sample:
    """Training images of `data` or of the run's own data, evenly spaced."""
    try:
        opened = _opened(run, card, data)
    except UserError as error:
        if data is not None:
            raise
        raise UserError(
            f"int8 needs images to calibrate with, but the run's data cannot be opened: {error} Give images: "
            "--calibrate DATA."
        ) from error
    return _chosen(opened, "train" if "train" in opened.splits else split_name(opened), card, _CALIBRATE, workers)


def _opened(run: str | Path, card: Card, data: str | Path | None) -> Data:
    """The run's own data, or other data, which needs no labels."""
    try:
        return own_data(run, card, data)
    except UserError as error:
        if data is None:
            raise
        try:
            bare = open_data(data, model=task_type(METHODS[0])(()))  # a task that reads images alone
        except UserError:
            raise error from None
        return bare.read_as(card.preprocess.channels, card.preprocess.bits)


def _chosen(data: Data, name: str, card: Card, count: int, workers: int) -> Sample:
    split, p = data.splits[name], card.preprocess
    numbers = np.unique(np.linspace(0, len(split) - 1, count).round().astype(int)).tolist()
    read = [
        (images.numpy(), np.asarray(targets)) for images, targets in loader.batches(split, p, _BATCH, workers, numbers)
    ]
    pixels, targets = (np.concatenate(part) for part in zip(*read, strict=True))
    if p.bits == 16:
        pixels = np.rint(pixels)  # resizing leaves fractions, which the input of a file cannot hold
    return Sample(
        pixels,
        f"{len(numbers):,} images of {data.name}, split {name}",
        targets if data.task.matches(card.task) else None,
        [fit(image, p.channels, p.bits) for image in loader.images(split, workers, numbers[:_WHOLE])],
    )


def _random(card: Card) -> Array:
    """Random pixels over the full range; for floats, normally distributed as the normalisation expects."""
    p = card.preprocess
    random, shape = np.random.default_rng(0), (_RANDOM, p.channels, *p.img_size)
    if p.bits == 32:
        mean, std = (np.reshape(numbers, (-1, 1, 1)) for numbers in (p.mean, p.std))
        return (random.standard_normal(shape) * std + mean).astype(p.dtype)
    return random.integers(0, WHITE[p.bits], shape, endpoint=True).astype(p.dtype)
