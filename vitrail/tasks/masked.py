"""Masked patch prediction, the self-supervision of the ViT paper: https://arxiv.org/abs/2010.11929, appendix B.1.2.

Half of the patches are corrupted: 80 % become a mask token, 10 % another patch of the image, 10 % stay as they are. For
each corrupted patch the model predicts its mean colour in 3 bits per channel, 512 classes for colour images. The
paper's two other targets are a 4×4 version of the patch with 3 bits per channel, 16 predictions in parallel ("mini"),
and all pixels by regression ("pixels").

Legend: B batch, N patches, P pixels per side of a patch, C channels, S predictions per patch (1 or 16), K colours.
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
from vitrail.models.decoder import MaskToken, patchify, unpatchify
from vitrail.tasks import register
from vitrail.tasks.masking import (
    MaskedModelling,
    MaskedObjective,
    count_masked,
    lowest,
    masked_tokens,
    need_patches,
    random_rows,
)
from vitrail.tasks.objective import Objective, Reconstruction
from vitrail.tasks.scores import Targets

LEVELS = 8  # 3 bits
MINI = 4  # pixels per side of the target "mini"
_MOST_COLOURS = LEVELS**4
_REPLACED, _KEPT = 0.1, 0.1  # shares of the corrupted patches; the rest becomes the mask token


@register
@dataclass(frozen=True)
class Masked(MaskedModelling):
    name: ClassVar[str] = "masked"
    title: ClassVar[str] = "masked patch prediction"

    @classmethod
    def small(cls, config: ModelConfig) -> dict[str, Any]:
        return {"mask_ratio": 0.5, "target": "colour"}

    def check_model(self, model: Model, config: TrainConfig) -> None:
        need_patches(model, self.name)
        super().check_model(model, config)
        target, seen = config.pretraining.target, config.input
        if target == "pixels":
            return
        if LEVELS**seen.channels > _MOST_COLOURS:
            raise UserError(f"Colours of 3 bits are not defined for {seen.channels} channels. Use --target pixels.")
        if target == "mini" and model.stride % MINI:
            raise UserError(f"--target mini needs a patch size that is a multiple of {MINI}, but it is {model.stride}.")

    def objective(self, model: Model, config: TrainConfig, targets: Targets) -> Objective:
        return MaskedPatches(model, config)


class MaskedPatches(MaskedObjective):
    """Cross-entropy of the colours of corrupted patches, or the mean squared error of their pixels.

    The colours of 8-bit images are from black to white. Deeper images often use a small part of their range: their
    colours are up to two standard deviations from the mean.
    """

    scale: Tensor
    offset: Tensor

    def __init__(self, model: Model, config: TrainConfig):
        super().__init__(model, config)
        c = model.config
        assert config.pretraining.target is not None
        self.target = config.pretraining.target
        self.colours = LEVELS**c.channels
        self.mask = MaskToken(1, 1, c.width)
        outputs = {"colour": self.colours, "mini": MINI**2 * self.colours, "pixels": c.stride**2 * c.channels}
        self.head = nn.Linear(c.width, outputs[self.target])
        seen = config.input  # a colour is a share of the range: normalised pixels times `scale` plus `offset`
        share = {"scale": seen.std, "offset": seen.mean} if seen.bits == 8 else {"scale": (0.25,), "offset": (0.5,)}
        for name, values in share.items():
            self.register_buffer(name, torch.tensor(values).view(-1, 1, 1), persistent=False)

    def noise(self, images: int, generator: torch.Generator | None = None) -> Tensor:
        """Three random numbers for each patch: which are corrupted, how, and by which other patch."""
        return random_rows(images, 3, self.model.config.grid[0] * self.model.config.grid[1], generator=generator)

    def losses(self, model: Model, images: Tensor, noise: Tensor) -> Tensor:
        predicted, mask = self.predict(model, images, noise)
        if self.target == "pixels":
            errors = (predicted - patchify(images, model.stride)).square().mean(dim=2)
        else:
            colours = self.quantised(images)
            logits = predicted.view(*mask.shape, -1, self.colours).permute(0, 3, 1, 2)  # B K N S
            errors = F.cross_entropy(logits, colours, reduction="none").mean(dim=2)
        return (errors * mask).sum(dim=1) / mask.sum(dim=1)

    def predict(self, model: Model, images: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs of the head for each patch, in fp32, and the mask of corrupted patches, (B, N)."""
        c: Any = model.config
        chosen, how, other = noise.unbind(1)
        corrupted = lowest(chosen, count_masked(chosen.shape[1], self.ratio))
        hidden = (corrupted & (how >= _REPLACED + _KEPT)).to(images.device)
        replaced = (corrupted & (how < _REPLACED)).to(images.device)
        patches = patchify(images, c.patch)
        others = patches.take_along_dim((other * other.shape[1]).long().to(images.device).unsqueeze(2), dim=1)
        changed = unpatchify(torch.where(replaced.unsqueeze(2), others, patches), c.grid, c.patch)
        encoded = model.encode(masked_tokens(model, changed, hidden, self.mask), norm=True)
        return self.head(encoded[:, -corrupted.shape[1] :]).float(), corrupted.to(images.device)

    def quantised(self, images: Tensor) -> Tensor:
        """The colours of each patch as class indices, (B, N, S): 3 bits per channel, the first channel highest."""
        side = self.model.stride if self.target == "colour" else self.model.stride // MINI
        small = F.avg_pool2d((images.float() * self.scale + self.offset).clamp(0, 1), side)
        levels = (small * LEVELS).long().clamp(max=LEVELS - 1)
        weights = LEVELS ** torch.arange(levels.shape[1] - 1, -1, -1, device=images.device)
        colours = (levels * weights.view(-1, 1, 1)).sum(dim=1, keepdim=True)
        return patchify(colours, 1 if self.target == "colour" else MINI)

    def painted(self, colours: Tensor) -> Tensor:
        """The inverse of `quantised`, up to rounding: normalised images."""
        c = self.model.config
        side = 1 if self.target == "colour" else MINI
        flat = unpatchify(colours, c.grid, side)
        powers = LEVELS ** torch.arange(c.channels - 1, -1, -1, device=colours.device).view(-1, 1, 1)
        values = ((flat // powers) % LEVELS + 0.5) / LEVELS
        return F.interpolate((values - self.offset) / self.scale, c.img_size, mode="nearest")

    def draw(self, model: Model, images: Tensor, noise: Tensor) -> Reconstruction:
        c: Any = model.config
        predicted, mask = self.predict(model, images, noise)
        if self.target != "pixels":
            predicted = patchify(self.painted(predicted.view(*mask.shape, -1, self.colours).argmax(dim=3)), c.patch)
        patches, hidden = patchify(images, c.patch), mask.unsqueeze(2)
        masked, drawn = patches.masked_fill(hidden, torch.nan), torch.where(hidden, predicted, patches)
        return Reconstruction(images, unpatchify(masked, c.grid, c.patch), unpatchify(drawn, c.grid, c.patch))

    def added(self) -> dict[str, nn.Module]:
        return {"head": self.head, "mask": self.mask}
