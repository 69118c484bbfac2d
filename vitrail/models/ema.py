"""The exponential moving average of a model's weights."""

from __future__ import annotations

import copy

import torch

from vitrail.models import Model
from vitrail.world import world


class Ema:
    """An exponential moving average of a model's weights, usually a better model than the last step's.

    This is Polyak averaging, as in the ViT paper. In runs too short for the decay, the average covers about the last
    tenth of the steps so far; a constant decay would keep the initial weights: 95 % of them after 500 steps at 0.9999.
    """

    def __init__(self, model: Model, decay: float):
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model: Model, step: int) -> None:
        """Updates the average after optimiser step `step`; the decay is lower in the first steps."""
        decay = min(self.decay, (1 + step) / (10 + step))
        pairs = zip(self.model.parameters(), model.parameters(), strict=True)
        shards = [(world().local(average), world().local(p)) for average, p in pairs if p.requires_grad]
        averages, weights = zip(*shards, strict=True)
        torch._foreach_lerp_(averages, weights, 1 - decay)
        for mine, theirs in zip(self.model.buffers(), model.buffers(), strict=True):
            mine.copy_(theirs)  # BatchNorm statistics are averages already
