"""LoRA: low-rank adapters beside frozen weights. https://arxiv.org/abs/2106.09685

In the attention of every adapted block, q, k, v and the output projection each get a pair of matrices:
y = W·x + scale·up·down·x. `up` starts at zero, so fresh adapters do not change the model's outputs. After training the
product is added to the weights (`merged`), so the saved model has no adapters.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.models import Model, build
from vitrail.models.layers import Attention


class LowRank(nn.Linear):
    """A linear layer that shares the weights of `base`, with one adapter for each of its `parts` (q, k and v)."""

    def __init__(self, base: nn.Linear, parts: int, rank: int, alpha: float):
        super().__init__(base.in_features, base.out_features, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.parts, self.scale = parts, alpha / rank
        bound = base.in_features**-0.5  # Kaiming uniform, with nn.Linear's slope
        self.down = nn.Parameter(base.weight.new_empty(parts, rank, base.in_features).uniform_(-bound, bound))
        self.up = nn.Parameter(base.weight.new_zeros(parts, base.out_features // parts, rank))

    def forward(self, x: Tensor) -> Tensor:
        low = torch.einsum("...i,pri->...pr", x, self.down)
        change = torch.einsum("...pr,por->...po", low, self.up).flatten(-2)
        return F.linear(x, self.weight, self.bias) + self.scale * change

    def merged_weight(self) -> Tensor:
        """The weight of the equivalent layer without adapters."""
        return self.weight + self.scale * (self.up @ self.down).flatten(0, 1)


def add_adapters(stages: Iterable[nn.Module], rank: int, alpha: float) -> None:
    """Adds adapters to the attention layers of these stages."""
    for stage in stages:
        for attention in [module for module in stage.modules() if isinstance(module, Attention)]:
            attention.qkv = LowRank(attention.qkv, 3, rank, alpha)
            attention.proj = LowRank(attention.proj, 1, rank, alpha)


def adapters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of all adapters in a model."""
    return [p for layer in _layers(model).values() for p in (layer.down, layer.up)]


@torch.no_grad()
def merged(model: Model) -> Model:
    """The equivalent model without adapters, products added to the weights; without adapters, the model itself."""
    layers = _layers(model)
    if not layers:
        return model
    added = {f"{name}.{matrix}" for name in layers for matrix in ("down", "up")}
    state = {name: value for name, value in model.state_dict().items() if name not in added}
    state |= {f"{name}.weight": layer.merged_weight() for name, layer in layers.items()}
    with torch.device("meta"):
        plain = build(model.config)
    plain.load_state_dict(state, assign=True)
    return plain


def _layers(model: nn.Module) -> dict[str, LowRank]:
    return {name: module for name, module in model.named_modules() if isinstance(module, LowRank)}
