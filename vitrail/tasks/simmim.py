"""SimMIM: masked image modelling with a linear decoder, https://arxiv.org/abs/2111.09886.

All tokens pass the encoder; those of masked squares are replaced by a mask token. One linear layer predicts the pixels,
with an L1 loss on the masked ones. A model whose tokens are not patches, such as a Swin or a ResNet, gets the image
with the masked squares in a learned colour instead: the authors replace Swin's patch embeddings.

Legend: B batch, N patches, C channels, (H, W) pixels, (h, w) last feature map.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import TrainConfig
from vitrail.errors import UserError
from vitrail.models import Model, ModelConfig
from vitrail.models.decoder import MaskToken, PixelDecoder
from vitrail.models.layers import as_map
from vitrail.models.position import Grid
from vitrail.tasks import register
from vitrail.tasks.masking import (
    MaskedModelling,
    MaskedObjective,
    count_masked,
    lowest,
    masked_tokens,
    random_rows,
    upsampled,
)
from vitrail.tasks.objective import Objective, Reconstruction
from vitrail.tasks.scores import Targets


@register
@dataclass(frozen=True)
class SimMim(MaskedModelling):
    name: ClassVar[str] = "simmim"
    title: ClassVar[str] = "SimMIM"
    cell: ClassVar[tuple[str, str]] = ("square", "squares")
    smaller: ClassVar[str] = "--mask-size"

    @classmethod
    def small(cls, config: ModelConfig) -> dict[str, Any]:
        """Squares of about a seventh of the image, as the authors' 32 of 224 pixels."""
        return {"mask_ratio": 0.6, "mask_size": config.stride * max(round(min(config.img_size) / 7 / config.stride), 1)}

    def check_model(self, model: Model, config: TrainConfig) -> None:
        side, stride = config.pretraining.mask_size, model.stride
        if not side or side % stride:
            raise UserError(f"'mask_size' must be a multiple of {stride}, the stride of the model, but it is {side}.")
        if self.cells(model, config) == 1 and side == stride:
            raise UserError(
                f"The image is a single square of {side} pixels, so it cannot be masked in part. Use a larger "
                f"--img-size, such as {2 * stride}."
            )
        super().check_model(model, config)

    def cells(self, model: Model, config: TrainConfig) -> int:
        h, w = squares(model.config, config)
        return h * w

    def objective(self, model: Model, config: TrainConfig, targets: Targets) -> Objective:
        return SimMimObjective(model, config)


class SimMimObjective(MaskedObjective):
    """The mean absolute error of masked pixels."""

    def __init__(self, model: Model, config: TrainConfig):
        super().__init__(model, config)
        c = model.config
        self.squares = squares(c, config)
        self.mask = MaskToken(1, 1, c.width) if model.patchwise else MaskToken(1, c.channels, 1, 1)
        self.decoder = PixelDecoder(c.width, c.stride, c.channels)

    def noise(self, images: int, generator: torch.Generator | None = None) -> Tensor:
        return random_rows(images, self.squares[0] * self.squares[1], generator=generator)

    def losses(self, model: Model, images: Tensor, noise: Tensor) -> Tensor:
        predicted, mask = self.predict(model, images, noise)
        errors = (predicted.float() - images).abs() * mask
        return errors.sum(dim=(1, 2, 3)) / (mask.sum(dim=(1, 2, 3)) * images.shape[1])

    def predict(self, model: Model, images: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """The predicted images, (B, C, H, W), and the mask of pixels, (B, 1, H, W); the lowest numbers are masked."""
        c = model.config
        chosen = lowest(noise, count_masked(noise.shape[1], self.ratio)).view(-1, *self.squares)
        mask = F.interpolate(chosen.unsqueeze(1).float(), c.grid, mode="nearest").flatten(1).to(images.device) > 0.5
        pixels = upsampled(mask, c.grid, c.stride)[:, :, : c.img_size[0], : c.img_size[1]]
        if model.patchwise:
            encoded = model.encode(masked_tokens(model, images, mask, self.mask), norm=True)
            features = as_map(encoded[:, -mask.shape[1] :], c.grid)
        else:
            features = model.features(self.mask(images, pixels))
        return self.decoder(features)[:, :, : c.img_size[0], : c.img_size[1]], pixels

    def draw(self, model: Model, images: Tensor, noise: Tensor) -> Reconstruction:
        predicted, mask = self.predict(model, images, noise)
        return Reconstruction(images, images.masked_fill(mask, torch.nan), torch.where(mask, predicted.float(), images))

    def added(self) -> dict[str, nn.Module]:
        return {"decoder": self.decoder, "mask": self.mask}


def squares(config: ModelConfig, settings: TrainConfig) -> Grid:
    """Rows and columns of the squares that are masked or not; none is smaller than a position of the feature map."""
    side = settings.pretraining.mask_size
    assert side is not None
    h, w = (
        max(min(round(pixels / side), places), 1) for pixels, places in zip(config.img_size, config.grid, strict=True)
    )
    return h, w
