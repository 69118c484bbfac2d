"""From the loader's pixels to the batch that an objective gets: augmentation, and crops if the method compares them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from vitrail.config import Size, TrainConfig
from vitrail.data import Data
from vitrail.data.augment import augment
from vitrail.data.crops import Crops, random_crops
from vitrail.data.preprocess import Preprocess
from vitrail.tasks.objective import Batch
from vitrail.world import world


def make_batch(
    pixels: Tensor,
    labels: Tensor,
    numbers: Tensor,
    config: TrainConfig,
    normalise: Callable[[Tensor], Tensor],
    classes: int,
    generator: torch.Generator,
    placed: bool = False,
) -> Batch:
    """The augmented and normalised images of a training step; `placed` ones, with annotations, are no longer moved."""
    how, views = config.augment, crops(config)
    if placed:
        still = replace(how, hflip=0.0)
        images, _ = augment(pixels, labels.new_zeros(len(pixels), 0), still, normalise, 0, generator)
        return Batch(images, labels, numbers)
    if not views:
        images, targets = augment(pixels, labels, how, normalise, classes, generator)
        return Batch(images, targets, numbers)
    cut = []
    for each in views:
        with world().views(each.count):
            view = random_crops(pixels, each, generator)
            cut.append(augment(view, labels.new_zeros(len(view), 0), how, normalise, 0, generator)[0])
    return Batch(cut[0], labels, numbers, cut[1] if len(cut) > 1 else None)


def crops(config: TrainConfig) -> list[Crops]:
    """The crops that the method compares: large ones, then small ones; empty for other methods."""
    how = config.pretraining
    if how.global_crops is None:
        return []
    assert how.global_scale is not None
    assert how.local_scale is not None
    assert how.local_size is not None
    large = Crops(how.global_crops, (how.global_scale[0], how.global_scale[1]), config.input.img_size)
    small = Crops(how.local_crops or 0, (how.local_scale[0], how.local_scale[1]), (how.local_size, how.local_size))
    return [large, small] if small.count else [large]


def read_size(config: TrainConfig, data: Data, preprocess: Preprocess) -> Preprocess:
    """The preprocessing of training images: larger than the model's input where crops are cut from large images."""
    if not crops(config):
        return preprocess
    h, w = preprocess.img_size
    factor = min(max(min(data.size) / min(h, w), 1.0), 2.0)
    size: Size = (round(h * factor), round(w * factor))
    return replace(preprocess, img_size=size)
