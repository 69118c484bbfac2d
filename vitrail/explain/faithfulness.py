"""Faithfulness of relevance maps: deletion and insertion curves, compared with random orders.

Deletion replaces patches by the image's mean colour, most relevant first: the probability of the class should drop
quickly. Insertion reveals them on a blurred image: it should rise quickly. The baselines are those of RISE
(https://arxiv.org/abs/1806.07421): inserted on a plain background, patches would have sharp edges unlike any training
image; deleted to a blur, the image would keep its coarse shape. Random orders are the control: only the gain over them
is evidence that a map is faithful.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vitrail.errors import UserError
from vitrail.explain.gradients import Classes, numbers
from vitrail.models import Model
from vitrail.tasks import Multiclass, Task

Curves = NDArray[np.float32]  # B S+1
Areas = NDArray[np.float32]  # B


@dataclass(frozen=True, eq=False)
class Faithfulness:
    """Deletion and insertion curves of a map, and of random orders (mean over draws)."""

    shares: NDArray[np.float32]  # S+1: share of patches removed or shown, from 0 to 1
    deletion: Curves
    insertion: Curves
    random_deletion: Curves
    random_insertion: Curves

    def area(self, curves: Curves) -> Areas:
        """The area under each curve."""
        widths, heights = np.diff(self.shares), (curves[:, 1:] + curves[:, :-1]) / 2
        return (heights * widths).sum(axis=1)

    @property
    def score(self) -> Areas:
        """Gain over a random order: area gained by insertion plus area saved by deletion.

        0 is no better than chance; 2 is the maximum.
        """
        gain = self.area(self.insertion) - self.area(self.random_insertion)
        return gain + self.area(self.random_deletion) - self.area(self.deletion)


def faithfulness(
    model: Model,
    images: Tensor,
    maps: NDArray[np.floating],
    classes: Classes,
    *,
    steps: int = 16,
    draws: int = 3,
    seed: int = 0,
    task: Task | None = None,
    batch_size: int = 64,
) -> Faithfulness:
    """Deletion and insertion curves of maps (B, h, w) over preprocessed images (B, C, H, W).

    Maps may have any grid. Patches are removed or shown in `steps` steps of nearly equal size; `draws` random orders
    are the control. For a regression the curves follow the model's output, in standard deviations.
    """
    if min(steps, draws, batch_size) < 1:
        raise UserError(f"steps, draws and batch_size must be at least 1, but are {steps}, {draws} and {batch_size}.")
    h, w = maps.shape[1:]
    if len(maps) != len(images) or h > images.shape[2] or w > images.shape[3]:
        raise UserError(
            f"Give one map per image, no finer than its pixels: maps of shape {maps.shape} do not fit images of shape "
            f"{tuple(images.shape)}."
        )
    patches = h * w
    ranks = [np.argsort(np.argsort(-maps.reshape(len(maps), patches), axis=1, kind="stable"), axis=1)]
    random = np.random.default_rng(seed)
    ranks += [random.permuted(np.tile(np.arange(patches), (len(maps), 1)), axis=1) for _ in range(draws)]
    gone = np.unique(np.linspace(0, patches, steps + 1).round().astype(np.int64))  # patches changed by each step

    chosen = numbers(classes, len(images), model.config.classes)
    answers = np.empty((2, 1 + draws, len(images), len(gone)), np.float32)
    training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            for i, image in enumerate(images.to(next(model.parameters()))):
                order = np.stack([rank[i] for rank in ranks]).reshape(-1, 1, h, w)
                hidden = torch.from_numpy(order < gone[:, None, None]).to(image.device)  # 1+draws S+1 h w
                probability = _Probability(model, int(chosen[i]), task or Multiclass(), batch_size)
                answers[0, :, i] = probability(hidden, plain(image), image)
                answers[1, :, i] = probability(hidden, image, blurred(image, (h, w)))
    finally:
        model.train(training)
    shares = (gone / patches).astype(np.float32)
    (deletion, *other_deletions), (insertion, *other_insertions) = answers
    return Faithfulness(
        shares, deletion, insertion, np.mean(other_deletions, axis=0), np.mean(other_insertions, axis=0)
    )


@dataclass(frozen=True)
class _Probability:
    """The probability of a class for mixtures of two images."""

    model: Callable[[Tensor], Tensor]
    number: int
    task: Task
    batch_size: int

    def __call__(self, chosen: Tensor, there: Tensor, elsewhere: Tensor) -> Curves:
        """One value per mask (..., h, w): `there` where it is true, `elsewhere` where it is false."""
        answers = []
        for part in torch.split(chosen.flatten(0, 1), self.batch_size):
            # If the grid does not divide a side, patches differ by a pixel.
            y, x = (torch.arange(side) * n // side for side, n in zip(there.shape[1:], part.shape[1:], strict=True))
            mask = part[:, y[:, None], x][:, None]
            logits = self.model(torch.where(mask, there, elsewhere)).float()
            answers.append(self.task.strength(logits)[:, self.number].cpu())
        return torch.cat(answers).numpy().reshape(chosen.shape[:2])


def plain(image: Tensor) -> Tensor:
    """A plain image (C, H, W) of the mean colour of another."""
    return image.mean(dim=(1, 2), keepdim=True).expand_as(image)


def blurred(image: Tensor, grid: tuple[int, int]) -> Tensor:
    """Gaussian blur of an image (C, H, W), with the size of a patch as standard deviation."""
    for axis, patches in ((1, grid[0]), (2, grid[1])):
        deviation = image.shape[axis] / patches
        reach = round(2 * deviation)
        offsets = torch.arange(-reach, reach + 1, device=image.device)
        kernel = torch.exp(-0.5 * (offsets / deviation) ** 2).to(image.dtype)
        lines = image.transpose(axis, 2)
        padded = F.pad(lines, (reach, reach), mode="replicate")
        image = F.conv1d(padded.flatten(0, 1)[:, None], (kernel / kernel.sum())[None, None])[:, 0]
        image = image.reshape(lines.shape).transpose(axis, 2)
    return image
