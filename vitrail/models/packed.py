"""Linear layers on oneDNN for inference on CPUs: the weights are laid out once as the kernel needs them.

`nn.Linear` passes plain weights, which the matrix library rearranges on every call. In an MLP the GELU runs inside the
first matrix product, which saves writing and reading its input.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from vitrail.models.layers import Mlp, activate

M = TypeVar("M", bound=nn.Module)
Gelu = Literal["none", "erf", "tanh"]  # the form of GELU that runs inside a matrix product


class PackedLinear(nn.Linear):
    """A linear layer that shares the parameters of `base`, computed from a packed copy in the precision `dtype`."""

    def __init__(self, base: nn.Linear, dtype: torch.dtype, gelu: Gelu = "none"):
        super().__init__(base.in_features, base.out_features, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.dtype, self.gelu = dtype, gelu
        self._packed: tuple[Tensor, Tensor | None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self._packed is None:  # the best layout depends on the number of rows
            rows = x.numel() // self.in_features
            weight = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach().to(self.dtype), rows)
            self._packed = weight, None if self.bias is None else self.bias.detach().to(self.dtype)
        activation, form = {"none": ("none", ""), "erf": ("gelu", "none"), "tanh": ("gelu", "tanh")}[self.gelu]
        return torch.ops.mkldnn._linear_pointwise(x.to(self.dtype), *self._packed, activation, [], form)


class PackedMlp(nn.Module):
    """`Mlp` for inference."""

    def __init__(self, base: Mlp, dtype: torch.dtype):
        super().__init__()
        self.quick = base.act == "quick_gelu"  # which oneDNN does not have
        self.fc1 = PackedLinear(base.fc1, dtype, "none" if self.quick else "tanh" if base.act == "gelu_tanh" else "erf")
        self.fc2 = PackedLinear(base.fc2, dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        return self.fc2(activate(x, "quick_gelu") if self.quick else x)


_PACKED: dict[type[nn.Module], Callable[..., nn.Module]] = {nn.Linear: PackedLinear, Mlp: PackedMlp}


def pack(model: M, dtype: torch.dtype = torch.float32) -> M:
    """A copy of a model for inference with packed linear layers. It shares the parameters and buffers."""
    shared = [*model.parameters(), *model.buffers()]
    packed = copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
    for parent in list(packed.modules()):
        for name, child in parent.named_children():
            if type(child) in _PACKED:
                setattr(parent, name, _PACKED[type(child)](child, dtype))
    return packed
