"""MAE: masked autoencoders, https://arxiv.org/abs/2111.06377.

The encoder sees only the visible patches, a quarter of them, which makes it fast; a light decoder predicts the pixels
of the masked ones. The target is each patch normalised by its own mean and standard deviation.

Legend: B batch, N patches, n visible patches, P pixels per side of a patch, C channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vitrail.config import TrainConfig
from vitrail.errors import UserError
from vitrail.models import Model, ModelConfig
from vitrail.models.decoder import MaeDecoder, patchify, unpatchify
from vitrail.tasks import register
from vitrail.tasks.masking import (
    MaskedModelling,
    MaskedObjective,
    count_masked,
    need_patches,
    visible_pixels,
)
from vitrail.tasks.objective import Objective, Reconstruction
from vitrail.tasks.scores import Targets


@register
@dataclass(frozen=True)
class Mae(MaskedModelling):
    name: ClassVar[str] = "mae"
    title: ClassVar[str] = "MAE"

    @classmethod
    def small(cls, config: ModelConfig) -> dict[str, Any]:
        """A decoder of half the encoder's width, from 64 to 512, in steps of 32."""
        width = min(max(math.ceil(config.width / 64) * 32, 64), 512)
        return {"mask_ratio": 0.75, "decoder_width": width, "decoder_depth": 2}

    def check_model(self, model: Model, config: TrainConfig) -> None:
        need_patches(model, self.name)
        super().check_model(model, config)
        if (config.pretraining.decoder_width or 0) % 32:
            raise UserError(
                f"'decoder_width' must be a multiple of 32, but it is {config.pretraining.decoder_width}: each head of "
                "the decoder is 32 wide."
            )

    def objective(self, model: Model, config: TrainConfig, targets: Targets) -> Objective:
        return MaeObjective(model, config)


class MaeObjective(MaskedObjective):
    """The mean squared error of the masked patches."""

    def __init__(self, model: Model, config: TrainConfig):
        super().__init__(model, config)
        c: Any = model.config
        how = config.pretraining
        assert how.decoder_width is not None
        assert how.decoder_depth is not None
        self.decoder = MaeDecoder(
            c.width,
            c.grid,
            c.prefix,
            c.patch**2 * c.channels,
            inner=how.decoder_width,
            depth=how.decoder_depth,
            heads=how.decoder_width // 32,
            eps=c.eps,
        )

    def losses(self, model: Model, images: Tensor, noise: Tensor) -> Tensor:
        predicted, mask = self.predict(model, images, noise)
        target, _, _ = normalised_patches(patchify(images, model.stride))
        errors = (predicted.float() - target).square().mean(dim=2)
        return (errors * mask).sum(dim=1) / mask.sum(dim=1)

    def predict(self, model: Model, images: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """The predicted patches, (B, N, P·P·C), and the mask, (B, N); the lowest random numbers stay visible."""
        c: Any = model.config
        patches = noise.shape[1]
        order = noise.argsort(dim=1).to(images.device)
        restore = order.argsort(dim=1)
        seen = patches - count_masked(patches, self.ratio)
        mask = restore >= seen
        prefix = torch.arange(c.prefix, device=images.device).expand(len(images), -1)
        keep = torch.cat([prefix, order[:, :seen] + c.prefix], dim=1)
        tokens = model.tokens(visible_pixels(model, images, mask))
        return self.decoder(model.encode(tokens, keep, norm=True), restore), mask

    def draw(self, model: Model, images: Tensor, noise: Tensor) -> Reconstruction:
        c: Any = model.config
        predicted, mask = self.predict(model, images, noise)
        patches = patchify(images, c.patch)
        _, mean, std = normalised_patches(patches)
        hidden = mask.unsqueeze(2)
        drawn = torch.where(hidden, predicted.float() * std + mean, patches)
        masked = patches.masked_fill(hidden, torch.nan)
        note = "The pattern of a masked patch is predicted; its brightness and contrast are the original's."
        return Reconstruction(images, unpatchify(masked, c.grid, c.patch), unpatchify(drawn, c.grid, c.patch), note)

    def added(self) -> dict[str, nn.Module]:
        return {"decoder": self.decoder}


def normalised_patches(patches: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Patches scaled by their own mean and standard deviation (unbiased variance, plus 1e-6), and these two."""
    patches = patches.float()
    mean, std = patches.mean(dim=2, keepdim=True), (patches.var(dim=2, keepdim=True) + 1e-6).sqrt()
    return (patches - mean) / std, mean, std
