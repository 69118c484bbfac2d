"""How far a map can be believed: what the model says while patches go, or come, in the order that the map gives.

Deletion paints patches over with the image's mean colour, the most relevant first: the probability of the class should
fall at once. Insertion uncovers them on a blurred picture: it should rise at once. These are the grounds of RISE
(https://arxiv.org/abs/1806.07421). On a plain one, the first patches to be inserted would be squares with sharp edges
such as no model was trained on; and a picture that is blurred at the end of deletion would still show its coarse shape.
The same is done in random orders, for only what a map does better than they do is worth anything.
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
    """The probability of a class while patches are removed or shown, by a map and at random (means over draws)."""

    shares: NDArray[np.float32]  # S+1: of the patches that are removed or shown, from 0 to 1
    deletion: Curves
    insertion: Curves
    random_deletion: Curves
    random_insertion: Curves

    def area(self, curves: Curves) -> Areas:
        """The area under each curve, which is its mean height."""
        widths, heights = np.diff(self.shares), (curves[:, 1:] + curves[:, :-1]) / 2
        return (heights * widths).sum(axis=1)

    @property
    def score(self) -> Areas:
        """How much better than a random order the map is: the areas above it of insertion and below it of deletion.

        At 0 the map tells nothing that chance does not; 2 is the most there could be.
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
    """Measures maps (B, h, w) of preprocessed images (B, C, H, W) by what removing and showing patches does.

    A map may be of any grid. Patches go in `steps` portions, as equal as they can be; `draws` random orders are the
    control. For a regression it is the model's output that is followed, in standard deviations.
    """
    if min(steps, draws, batch_size) < 1:
        raise UserError(f"steps, draws and batch_size must be at least 1, but are {steps}, {draws} and {batch_size}.")
    h, w = maps.shape[1:]
    if len(maps) != len(images) or h > images.shape[2] or w > images.shape[3]:
        raise UserError(f"Maps of shape {maps.shape} do not lie over images of shape {tuple(images.shape)}.")
    patches = h * w
    ranks = [np.argsort(np.argsort(-maps.reshape(len(maps), patches), axis=1, kind="stable"), axis=1)]
    random = np.random.default_rng(seed)
    ranks += [random.permuted(np.tile(np.arange(patches), (len(maps), 1)), axis=1) for _ in range(draws)]
    gone = np.unique(np.linspace(0, patches, steps + 1).round().astype(np.int64))  # patches that went, at each step

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
    """What a model gives one class for an image of which some patches are of another."""

    model: Callable[[Tensor], Tensor]
    number: int
    task: Task
    batch_size: int

    def __call__(self, chosen: Tensor, there: Tensor, elsewhere: Tensor) -> Curves:
        """For every set of patches, (..., h, w), which show `there` while the others show `elsewhere`."""
        answers = []
        for part in torch.split(chosen.flatten(0, 1), self.batch_size):
            # A side that the grid does not divide has patches that differ by a pixel.
            y, x = (torch.arange(side) * n // side for side, n in zip(there.shape[1:], part.shape[1:], strict=True))
            mask = part[:, y[:, None], x][:, None]
            logits = self.model(torch.where(mask, there, elsewhere)).float()
            answers.append(self.task.strength(logits)[:, self.number].cpu())
        return torch.cat(answers).numpy().reshape(chosen.shape[:2])


def plain(image: Tensor) -> Tensor:
    """An image (C, H, W) of the mean colour of another."""
    return image.mean(dim=(1, 2), keepdim=True).expand_as(image)


def blurred(image: Tensor, grid: tuple[int, int]) -> Tensor:
    """An image (C, H, W) in which nothing smaller than a patch is left: a Gaussian with a patch as its deviation."""
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
