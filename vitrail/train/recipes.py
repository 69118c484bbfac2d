"""Recipes: functions from what is known of the data to a complete configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from vitrail.config import ArchConfig, AugmentConfig, InputConfig, OptimConfig, RunConfig, TrainConfig, options
from vitrail.device import choose_precision
from vitrail.models import ModelConfig


@dataclass(frozen=True)
class Facts:
    """What a recipe may look at: the data, the model to train, and how long if the user said so."""

    source: str
    name: str
    images: int
    model: str
    config: ModelConfig
    device: str
    epochs: int | None
    weights: str | None


def small(facts: Facts) -> TrainConfig:
    """From scratch on small data, below about 100,000 images: the default.

    `vitrail train fashion-mnist`: 91.87 % of the 10,000 test images after 10 epochs, 12 min 49 s on two CPU cores.
    `vitrail train digits --epochs 30`: 98.05 % of 359 held-out digits at the best epoch, 58 s on the same cores.
    """
    epochs = facts.epochs or min(max(round(600_000 / facts.images), 10), 60)
    few = facts.images < 10_000  # so few that the model learns them by heart unless it is hindered
    return TrainConfig(
        data=facts.source,
        recipe="small",
        model=facts.model,
        weights=facts.weights,
        input=_input(facts.config),
        arch=replace(_arch(facts.config), drop_path=0.1 if few else 0.0),
        optim=OptimConfig(
            epochs=epochs,
            batch_size=_batch(facts.images),
            opt="muon",
            lr=2e-3,
            weight_decay=0.05,
            sched="linear",
            warmup_epochs=round(0.1 * epochs, 2),
        ),
        augment=replace(_augment(facts.config), mixup=0.2 if few else 0.0),
        run=_run(facts),
    )


def finetune(facts: Facts) -> TrainConfig:
    """From trained weights: AdamW, a lower rate for stages far from the head; the default with --weights."""
    epochs = facts.epochs or min(max(round(200_000 / facts.images), 5), 50)
    return TrainConfig(
        data=facts.source,
        recipe="finetune",
        model=facts.model,
        weights=facts.weights,
        input=_input(facts.config),
        arch=_arch(facts.config),
        optim=OptimConfig(
            epochs=epochs,
            batch_size=_batch(facts.images),
            opt="adamw",
            lr=1e-3,
            weight_decay=0.05,
            sched="cosine",
            warmup_epochs=round(0.1 * epochs, 2),
            layer_decay=0.85,
        ),
        augment=_augment(facts.config),
        run=_run(facts),
    )


def _batch(images: int) -> int:
    """A power of two that gives an epoch 20 steps or more; 16 to 128."""
    batch = 16
    while batch < 128 and images >= 20 * 2 * batch:
        batch *= 2
    return batch


def _augment(config: ModelConfig) -> AugmentConfig:
    """Small shifts, where a pixel is not already a large one; mirror images of photographs, not of grey signs."""
    shift = min(config.img_size) // 14 if min(config.img_size) >= 16 else 0
    return AugmentConfig(shift=shift, hflip=0.5 if config.channels == 3 else 0.0, smoothing=0.1)


def _input(config: ModelConfig) -> InputConfig:
    return InputConfig(img_size=config.img_size, channels=config.channels)


def _arch(config: ModelConfig) -> ArchConfig:
    return ArchConfig(**{name: getattr(config, name) for name in options(ArchConfig)})


def _run(facts: Facts) -> RunConfig:
    return RunConfig(name=f"{facts.name}-{facts.model}", device=facts.device, amp=choose_precision(facts.device))


RECIPES: dict[str, Callable[[Facts], TrainConfig]] = {"small": small, "finetune": finetune}
