"""Attention as the runtimes of exported files compute it fastest.

PyTorch is fastest with one matrix product for queries, keys and values. Runtimes copy its three parts, so exported
graphs have three products; and the keys are transposed in a way that OpenVINO fuses with the products around it. With
both, OpenVINO computed a Ti/16 2.23 instead of 1.81 times as fast as PyTorch in int8, and 1.09 instead of 0.98 times in
float32 (benchmarks/int8.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.models import Model
from vitrail.models.layers import Attention


class _Apart(Attention):
    """`Attention` whose `qkv` is a list of three layers."""

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        layers: Iterable[nn.Module] = self.qkv  # type: ignore[assignment]
        q, k, v = (layer(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for layer in layers)
        return q, k, v


def split_qkv(model: Model) -> Model:
    """A copy of a model in which queries, keys and values are layers of their own: `qkv.0`, `qkv.1` and `qkv.2`."""
    model = deepcopy(model)
    for module in model.modules():
        if type(module) is Attention:
            layers = nn.ModuleList(_third(module.qkv, i) for i in range(3))
            module.__class__ = _Apart
            module.qkv = layers  # type: ignore[assignment]
    return model


def _third(layer: nn.Linear, index: int) -> nn.Linear:
    part = nn.Linear(layer.in_features, layer.out_features // 3, device="meta")
    part.weight, part.bias = (
        nn.Parameter(whole.detach().chunk(3)[index].contiguous(), requires_grad=False)
        for whole in (layer.weight, layer.bias)
    )
    return part


def scaled_dot_product_attention(
    q: Any, k: Any, v: Any, mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, **options: Any
) -> Any:
    """The operator of this name in ONNX, of tensors of onnxscript."""
    from onnxscript import opset20 as op

    assert not any([dropout_p, is_causal, *options.values()])  # no model for images has them
    scale = op.Constant(value_float=q.shape[-1] ** -0.5)
    axes = list(range(len(k.shape)))
    logits = op.MatMul(op.Mul(q, scale), op.Transpose(k, perm=[*axes[:-2], axes[-1], axes[-2]]))
    if mask is not None and mask.dtype.name == "BOOL":
        logits = op.Where(mask, logits, op.Constant(value_float=float("-inf")))
    elif mask is not None:
        logits = op.Add(logits, mask)
    return op.MatMul(op.Softmax(logits, axis=-1), v)


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.aten.scaled_dot_product_attention.default: scaled_dot_product_attention
}
