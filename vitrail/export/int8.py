"""Post-training quantisation: the ranges of activations, and the damage that quantising a layer does.

A format quantises in its own runtime's way. Both need to know which layers suffer: that is measured here with PyTorch,
by rounding one layer's inputs and weights at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.models import Model

Kinds = tuple[type[nn.Module], ...]  # of layers that a format quantises
Ranges = Mapping[str, tuple[float, float]]  # the lowest and highest input of each layer, by name

_BATCH = 16  # images
_TAIL = 1e-4  # share of the values that may lie outside a range: outliers would waste most of its 256 steps
_DAMAGE = 16  # images that damage is measured on
_WEIGHT_STEPS = 63  # of 7-bit weights, on either side of 0


def measure_ranges(model: Model, images: Tensor, kinds: Kinds) -> Ranges:
    """The range of the inputs of each layer of these kinds for normalised images, without outliers, averaged."""
    found: dict[str, list[tuple[float, float]]] = {}

    def watch(name: str) -> Callable[..., None]:
        def see(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            values = inputs[0].detach().flatten()
            beyond = max(int(_TAIL * len(values)), 1)
            low, high = values.topk(beyond, largest=False).values[-1], values.topk(beyond).values[-1]
            found.setdefault(name, []).append((min(float(low), 0.0), max(float(high), 0.0)))

        return see

    hooks = [layer.register_forward_pre_hook(watch(name)) for name, layer in _layers(model) if isinstance(layer, kinds)]
    try:
        with torch.inference_mode():
            for batch in torch.split(images, _BATCH):
                model(batch)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: (_mean(low for low, _ in each), _mean(high for _, high in each)) for name, each in found.items()}


def measure_damage(model: Model, images: Tensor, ranges: Ranges) -> dict[str, float]:
    """The error of the outputs when only this layer is quantised, relative to their spread; the worst layer first."""
    with torch.inference_mode():
        images = images[:_DAMAGE]
        expected = model(images)
        spread = expected.std().clamp(min=1e-12)
        damage = {}
        for name, layer in _layers(model):
            if name in ranges:
                with _rounded(layer, *ranges[name]):
                    damage[name] = float((model(images) - expected).square().mean().sqrt() / spread)
    return dict(sorted(damage.items(), key=lambda pair: -pair[1]))


def _layers(model: Model) -> list[tuple[str, nn.Linear | nn.Conv2d]]:
    return [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d)]


@contextmanager
def _rounded(layer: nn.Linear | nn.Conv2d, low: float, high: float) -> Iterator[None]:
    """Rounds the layer's inputs to 256 steps of a range and its weights to 7 bits per output channel."""
    step = max((high - low) / 255, 1e-12)

    def round_input(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        zero = round(-low / step)
        return (((inputs[0] / step).round() + zero).clamp(0, 255).sub(zero).mul(step), *inputs[1:])

    original = layer.weight.data
    steps = original.flatten(1).abs().amax(dim=1).clamp(min=1e-12).div(_WEIGHT_STEPS)
    steps = steps.view(-1, *[1] * (original.ndim - 1))
    hook = layer.register_forward_pre_hook(round_input)
    try:
        layer.weight.data = (original / steps).round() * steps
        yield
    finally:
        layer.weight.data = original
        hook.remove()


def _mean(values: Iterator[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)
