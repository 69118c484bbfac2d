"""The rules by which recipes adapt to any data size, model and batch size.

With data of the published size, recipes have the published values. Otherwise, and where the user changes settings,
they follow these rules:

- The batch is the published one, or on small data the largest power of two that gives an epoch 20 steps. It is split
  into forward passes of at most 128 images, whose gradients are accumulated. With `--batch-size`, there is one pass
  unless `--grad-accum` asks for more.
- The learning rate is the published one at the published batch. At another it is scaled, with SGD and DeiT by the
  batch, with Adam and LAMB by its square root (https://arxiv.org/abs/2205.10287, https://arxiv.org/abs/1904.00962).
- The warm-up is the published one, but at most an eighth of the run.
- Only colour images are flipped: a mirrored grey-scale symbol is often another symbol or none.
- Photographs are trained at the published size, smaller images at their own. The published centre crop in evaluation
  is for photographs only, ImageNet's mean for images of three channels only.
- With --weights, the architecture is that of the weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from vitrail.config import ArchConfig, AugmentConfig, InputConfig, OptimConfig, RunConfig, TrainConfig, options
from vitrail.device import choose_precision
from vitrail.models import ModelConfig

SMALL_IMAGE = 96  # longest side of small images, which keep their size; larger ones are photographs
OFTEN = 20  # epochs from which small data is seen often enough to overfit
_PASS = 128  # images of a forward pass, unless the user sets --batch-size


@dataclass(frozen=True)
class RecipeInputs:
    """What a recipe may depend on: the data, the model, and the user's length and batch size, if set."""

    source: str
    name: str
    images: int
    model: str
    config: ModelConfig
    device: str
    epochs: float | None
    weights: str | None
    only_new: bool = False  # only a new head or adapters are trained
    batch_size: int | None = None
    grad_accum: int | None = None
    method: str | None = None  # of self-supervised pre-training
    unlabelled: bool = False  # the weights were pre-trained without labels


def published(
    recipe: str,
    inputs: RecipeInputs,
    *,
    optim: dict[str, Any],
    augment: AugmentConfig,
    fresh: dict[str, Any] | None = None,  # architecture, unless there are weights
    drop: float = 0.0,
    drop_path: float = 0.0,
    crop: float = 0.875,
    normalize: Literal["half", "imagenet"] = "half",
) -> TrainConfig:
    """The configuration of a published recipe for these inputs."""
    c = inputs.config
    wanted = {"drop": drop, "drop_path": drop_path, **({} if inputs.weights or fresh is None else fresh)}
    changes = {name: value for name, value in wanted.items() if getattr(arch_config(c), name) is not None}
    return TrainConfig(
        data=inputs.source,
        recipe=recipe,
        model=inputs.model,
        weights=inputs.weights,
        input=replace(
            input_config(c),
            crop=crop if max(c.img_size) > SMALL_IMAGE else 1.0,
            normalize=normalize if c.channels == 3 else "half",
        ),
        arch=replace(arch_config(c), **changes),
        optim=scaled_optim(inputs, **optim),
        augment=augment,
        run=run_config(inputs),
    )


def scaled_optim(
    inputs: RecipeInputs,
    *,
    epochs: int,
    batch: int,
    lr: float,
    scaling: Literal["linear", "sqrt"],
    warmup_steps: int = 0,
    warmup_epochs: float = 0.0,
    **rest: Any,
) -> OptimConfig:
    """The published values, adjusted by the rules above."""
    size = inputs.batch_size or batch_size(inputs.images, batch)
    passes = inputs.grad_accum or (1 if inputs.batch_size else max(size // _PASS, 1))
    share, length = size / batch, inputs.epochs or epochs
    warmup = warmup_epochs or warmup_steps / max(inputs.images // size, 1)
    return OptimConfig(
        epochs=length,
        batch_size=size,
        grad_accum=passes,
        lr=float(f"{lr * (share if scaling == 'linear' else math.sqrt(share)):.4g}"),
        warmup_epochs=round(min(warmup, length / 8), 2),
        body_lr=1.0,
        **rest,
    )


def batch_size(images: int, most: int = 128, steps: int = 20) -> int:
    """A power of two that gives an epoch this many steps or more; from 16 to `most`."""
    batch = 16
    while batch < most and images >= steps * 2 * batch:
        batch *= 2
    return batch


def light_augment(config: ModelConfig, epochs: float) -> AugmentConfig:
    """Small shifts, flips of colour images, label smoothing."""
    return AugmentConfig(shift=shift(config, epochs), hflip=hflip(config), smoothing=0.1)


def shift(config: ModelConfig, epochs: float) -> int:
    """The largest shift in pixels: a fourteenth of the image, none if it is tiny.

    Small images are shifted less in few epochs, where shifts cost more than they teach: docs/recipes.md.
    """
    most = min(config.img_size) // 14 if min(config.img_size) >= 16 else 0
    return most if photo(config) else round(most * min(epochs / OFTEN, 1))


def photo(config: ModelConfig) -> bool:
    """Whether images are large enough to be cropped."""
    return min(config.img_size) >= 64


def input_config(config: ModelConfig) -> InputConfig:
    """The model's input size and channels."""
    return InputConfig(img_size=config.img_size, channels=config.channels)


def arch_config(config: ModelConfig) -> ArchConfig:
    """The model's architecture options; None for those it does not have."""
    has = {field.name for field in fields(config)}
    values: dict[str, Any] = {name: getattr(config, name) if name in has else None for name in options(ArchConfig)}
    return ArchConfig(**values)


def run_config(inputs: RecipeInputs) -> RunConfig:
    """The name, device and precision of the run."""
    name = "-".join(filter(None, [inputs.name, inputs.model, inputs.method]))
    return RunConfig(name=name, device=inputs.device, amp=choose_precision(inputs.device))


def hflip(config: ModelConfig) -> float:
    """The probability of a horizontal flip."""
    return 0.0 if config.channels == 1 else 0.5
