"""Multi-crop methods: what `dino` and `lejepa` share. They learn equal features for different crops of one image.

Legend: B batch, V global views, L local views, F features.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.charts.measure import Measure
from vitrail.config import TrainConfig
from vitrail.errors import UserError
from vitrail.models import Model, ModelConfig
from vitrail.models.resized import Resized
from vitrail.tasks.objective import Batch, Objective
from vitrail.tasks.pretraining import Pretraining
from vitrail.world import world

_CENTRE = 0.75  # side of the second view in validation, relative to the image


@dataclass(frozen=True)
class MultiCrop(Pretraining):
    """Base class of the methods that compare views of an image."""

    measures: ClassVar[tuple[Measure, ...]] = (
        replace(Pretraining.measures[0], meaning="the loss between each validation image and its centre crop"),
        *Pretraining.measures[1:],
    )
    crops: ClassVar[bool] = True
    rescue: ClassVar[str] = "Lower --lr, or use a larger --batch-size."

    @classmethod
    def small(cls, config: ModelConfig) -> dict[str, Any]:
        return {
            "global_crops": 2,
            "local_crops": 4,
            "global_scale": (0.4, 1.0),
            "local_scale": (0.1, 0.4),
            "local_size": local_size(config),
            "head_width": min(4 * config.features, 2048),
        }

    def check_model(self, model: Model, config: TrainConfig) -> None:
        """Raises UserError for crops that the model cannot read, and for a batch without anything to compare with."""
        how, c = config.pretraining, model.config
        assert how.local_size is not None
        assert how.local_crops is not None
        assert how.global_crops is not None
        if config.optim.pass_size < 2:
            raise UserError(
                f"'{self.name}' compares the images of a batch, but a forward pass would have only one. Use a larger "
                "--batch-size or a smaller --grad-accum."
            )
        if how.global_crops + how.local_crops < 2:
            raise UserError(f"'{self.name}' compares crops of an image, so it needs two or more. Raise --global-crops.")
        if how.local_crops and (how.local_size % c.step or not c.step <= how.local_size <= min(c.img_size)):
            raise UserError(
                f"'local_size' must be a multiple of {c.step} and at most the image size, {min(c.img_size)}, but it is "
                f"{how.local_size}. Change --local-size or --img-size, or use --local-crops 0."
            )
        if how.local_crops and how.local_size != min(c.img_size):
            try:
                Resized(model, (how.local_size, how.local_size))
            except UserError as error:
                raise UserError(
                    f"A {type(model).__name__} reads images of one size only, so it cannot read small crops. Use "
                    "--local-crops 0."
                ) from error
        for name, scale in (("global_scale", how.global_scale), ("local_scale", how.local_scale)):
            assert scale is not None
            if len(scale) != 2 or not 0 < scale[0] <= scale[1] <= 1:
                given = ", ".join(f"{value:g}" for value in scale)
                raise UserError(
                    f"'{name}' must be two shares of the area, the smaller first, such as 0.4 1, but it is {given}."
                )


def local_size(config: ModelConfig) -> int:
    """The side of small crops: 96 of 224 pixels, rounded to what the model reads."""
    side = min(config.img_size)
    return min(max(round(side * 96 / 224 / config.step), 1) * config.step, side)


class MultiCropObjective(Objective):
    """Base class of objectives over views. The features of local crops come from the model at their size."""

    def __init__(self, model: Model, config: TrainConfig, ema: float):
        super().__init__(model, ema)
        how = config.pretraining
        assert how.global_crops is not None
        assert how.local_crops is not None
        assert how.local_size is not None
        self.views = how.global_crops
        self.stagewise = not how.local_crops  # small crops read the weights of all stages at once
        self._small = Resized(model, (how.local_size, how.local_size)) if how.local_crops else None

    def features(self, batch: Batch) -> Tensor:
        """The features of all views, global ones first: (V + L, B, F)."""
        images = len(batch.numbers)
        with world().views(self.views):
            found = self.model.embed(batch.images)
        if batch.local is not None and self._small is not None:
            with world().views(len(batch.local) // images):
                found = torch.cat([found, self._small.embed(self.model, batch.local)])
        return found.view(-1, images, found.shape[1])

    def examine(self, model: Model, images: Tensor) -> Tensor:
        """The loss between each image and its centre, and the features of the image."""
        h, w = images.shape[2:]
        top, left = round(h * (1 - _CENTRE) / 2), round(w * (1 - _CENTRE) / 2)
        centre = images[:, :, top : h - top, left : w - left]
        features = model.embed(images)
        views = torch.stack([features, model.embed(F.interpolate(centre, (h, w), mode="bilinear", antialias=True))])
        return torch.cat([self.losses(views).unsqueeze(1), features], dim=1)

    @abstractmethod
    def losses(self, features: Tensor) -> Tensor:
        """The loss of each image from the features of its two validation views, (2, B, F): (B,)."""
