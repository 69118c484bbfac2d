"""A data set of any size that takes no memory: to resolve recipes and plan runs without data."""

from __future__ import annotations

import numpy as np

from vitrail.data.dataset import ArraySplit, Data
from vitrail.tasks import METHODS, Multiclass, task_type

IMAGENET_IMAGES, IMAGENET_CLASSES = 1_281_167, 1000
_PHOTO = (375, 500)  # a typical photograph


def blank(
    images: int = IMAGENET_IMAGES,
    classes: int = IMAGENET_CLASSES,
    *,
    val: int = 50_000,
    size: tuple[int, int] = _PHOTO,
    channels: int = 3,
    task: str | None = None,
    name: str = "imagenet",
) -> Data:
    """Black images of the first class, by default as many as ImageNet-1k's; a self-supervised task has no labels."""
    labelled = task not in METHODS

    def split(count: int) -> ArraySplit:
        pixels = np.broadcast_to(np.zeros((1, 1, 1, 1), np.uint8), (count, *size, channels))
        targets = np.broadcast_to(np.zeros(1, np.int64), (count,)) if labelled else np.zeros((count, 0), np.float32)
        return ArraySplit(pixels, targets, name)

    kind = Multiclass(tuple(str(number) for number in range(classes))) if labelled else task_type(task)()
    return Data(name, kind, {"train": split(images), "val": split(val)}, size, channels, ())
