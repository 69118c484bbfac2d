"""Projection heads of self-supervision, between the features and the loss. They exist only during pre-training."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from vitrail.models.norm import BatchNorm1d


class DinoHead(nn.Module):
    """DINO's head: an MLP of three layers, L2 normalisation, and a weight-normalised layer to the prototypes.

    Names and initialisation follow the authors' code (https://github.com/facebookresearch/dino); the gain of the last
    layer stays at 1.
    """

    def __init__(self, features: int, prototypes: int, hidden: int = 2048, bottleneck: int = 256):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(features, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, bottleneck)
        )
        for layer in self.mlp:
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)
        self.last_layer = weight_norm(nn.Linear(bottleneck, prototypes, bias=False))
        gain = self.last_layer.parametrizations.weight.original0
        gain.requires_grad_(False).fill_(1.0)

    def forward(self, x: Tensor, frozen: bool = False) -> Tensor:
        """The logits of prototypes; the last layer does not learn if it is `frozen`."""
        weight = self.last_layer.weight
        return F.linear(F.normalize(self.mlp(x), dim=-1), weight.detach() if frozen else weight)


class Projector(nn.Sequential):
    """LeJEPA's projector: an MLP of three layers with BatchNorm."""

    def __init__(self, features: int, out: int, hidden: int = 2048):
        super().__init__(
            nn.Linear(features, hidden),
            BatchNorm1d(hidden),
            nn.GELU(),
            nn.Linear(hidden, hidden),
            BatchNorm1d(hidden),
            nn.GELU(),
            nn.Linear(hidden, out),
        )
