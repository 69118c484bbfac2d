"""Masked image modelling: what `masked`, `mae` and `simmim` share.

Legend: B batch, N patches, P pixels per side of a patch, C channels.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from vitrail.config import TrainConfig
from vitrail.errors import UserError
from vitrail.models import Model
from vitrail.models.decoder import MaskToken
from vitrail.models.position import Grid
from vitrail.tasks.objective import Batch, Objective, Reconstruction
from vitrail.tasks.pretraining import Pretraining
from vitrail.world import world


@dataclass(frozen=True)
class MaskedModelling(Pretraining):
    """Base class of the methods that predict what was masked."""

    rescue: ClassVar[str] = "Lower --lr, or mask less with --mask-ratio."
    cell: ClassVar[tuple[str, str]] = ("patch", "patches")  # what is masked or not
    smaller: ClassVar[str] = "patch size"  # what gives an image more of them

    def check_model(self, model: Model, config: TrainConfig) -> None:
        """Raises UserError unless some patches are masked and some are not."""
        ratio, cells = config.pretraining.mask_ratio, self.cells(model, config)
        assert ratio is not None
        if cells == 1:
            raise UserError(
                f"The image is a single {self.cell[0]}, so it cannot be masked in part. Use a smaller {self.smaller} "
                "or a larger --img-size."
            )
        if not (0 < ratio < 1 and count_masked(cells, ratio) < cells):
            most = math.floor(1000 * (1 - 1 / cells)) / 1000
            raise UserError(
                f"'mask_ratio' must be above 0 and at most {most:g}, so that some of the {cells} {self.cell[1]} are "
                f"masked and some are not, but it is {ratio:g}."
            )

    def cells(self, model: Model, config: TrainConfig) -> int:
        """What is masked or not: the patches."""
        return model.config.grid[0] * model.config.grid[1]


class MaskedObjective(Objective):
    """Base class of objectives that mask images: `losses` gives the loss of each image for given random numbers."""

    def __init__(self, model: Model, config: TrainConfig):
        super().__init__(model, config.optim.model_ema)
        self.ratio = config.pretraining.mask_ratio or 0.0

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        return {"loss": self.losses(self.model, batch.images, self.noise(len(batch.images))).mean()}

    def examine(self, model: Model, images: Tensor) -> Tensor:
        """The loss of each image, always with the same masks, and its features."""
        noise = self.noise(len(images), torch.Generator().manual_seed(0))
        return torch.cat([self.losses(model, images, noise).unsqueeze(1), model.embed(images)], dim=1)

    def noise(self, images: int, generator: torch.Generator | None = None) -> Tensor:
        """Random numbers that decide which patches of each image are masked: (B, N), on the CPU."""
        h, w = self.model.config.grid
        return random_rows(images, h * w, generator=generator)

    @abstractmethod
    def losses(self, model: Model, images: Tensor, noise: Tensor) -> Tensor:
        """The loss of each image, (B,)."""

    def reconstruct(self, model: Model, images: Tensor) -> Reconstruction:
        """Original, masked and predicted images, always with the same masks."""
        return self.draw(model, images, self.noise(len(images), torch.Generator().manual_seed(0)))

    @abstractmethod
    def draw(self, model: Model, images: Tensor, noise: Tensor) -> Reconstruction:
        """Original, masked and predicted images."""


def random_rows(images: int, *shape: int, generator: torch.Generator | None) -> Tensor:
    """Random numbers for each image: of a training batch, or always the same ones from a generator."""
    if generator is not None:
        return torch.rand(images, *shape, generator=generator)
    return world().drawn(lambda rows: torch.rand(rows, *shape), images)


def count_masked(patches: int, ratio: float) -> int:
    """The number of masked patches, N - ⌊N·(1 - ratio)⌋, as in MAE."""
    return patches - int(patches * (1 - ratio))


def lowest(noise: Tensor, count: int) -> Tensor:
    """A mask of the `count` lowest numbers of each row: (B, N), bool."""
    return noise.argsort(dim=1).argsort(dim=1) < count


def upsampled(mask: Tensor, grid: Grid, patch: int) -> Tensor:
    """A mask of patches, (B, N), as a mask of pixels, (B, 1, H, W)."""
    return mask.view(-1, *grid).repeat_interleave(patch, 1).repeat_interleave(patch, 2).unsqueeze(1)


def visible_pixels(model: Model, images: Tensor, mask: Tensor) -> Tensor:
    """The images that a patch embedding may see.

    A convolutional stem sees beyond a patch, so masked pixels have the mean of the visible ones: a constant such as 0
    would change the statistics of its group norms more, compared with the whole images of fine-tuning.
    """
    c: Any = model.config
    if c.stem != "conv":
        return images
    hidden = upsampled(mask, c.grid, c.patch)
    total = images.masked_fill(hidden, 0.0).sum(dim=(2, 3), keepdim=True)
    return torch.where(hidden, total / (~hidden).sum(dim=(2, 3), keepdim=True), images)


def masked_tokens(model: Model, images: Tensor, mask: Tensor, token: MaskToken) -> Tensor:
    """The encoder's input with the tokens of masked patches, (B, N), replaced by the mask token at their positions."""
    tokens, patches = model.tokens(visible_pixels(model, images, mask)), mask.shape[1]
    places = model.position_embeddings()
    added = places[0][0][:, -patches:] if places else None
    replaced = token(tokens[:, -patches:], mask.unsqueeze(2), added)
    return torch.cat([tokens[:, :-patches], replaced], dim=1)


def need_patches(model: Model, method: str) -> None:
    """Raises UserError for a model whose encoder cannot leave out or replace the tokens of patches."""
    if not model.patchwise:
        raise UserError(
            f"'{method}' leaves out or replaces the tokens of patches, which only a ViT allows, not a "
            f"{type(model).__name__}. Use a ViT, or --method simmim."
        )
