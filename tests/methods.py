"""Objectives of self-supervised methods on small models, for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from made_up import data_of

from vitrail.config import TrainConfig
from vitrail.models import Model, build
from vitrail.models.vit import ViTConfig
from vitrail.tasks import task_type
from vitrail.tasks.objective import Batch
from vitrail.train.resolve import resolve

VIT = ViTConfig(width=32, depth=2, heads=2, mlp=64, patch=4, img_size=(16, 16), channels=3, classes=0)


def settings(method: str, size: int = 16, channels: int = 3, **given: Any) -> TrainConfig:
    """The resolved configuration of a method, for images of this size."""
    data = data_of(size, channels=channels)
    return resolve("made-up", replace(data, task=task_type(method)()), {"device": "cpu", **given})


def objective(method: str, model: Model | None = None, images: int = 1000, **given: Any) -> Any:
    """The objective of a method for a model; by default a small ViT for 16x16 colour images."""
    model = build(VIT) if model is None else model
    config = settings(method, model.config.img_size[0], model.config.channels, **given)
    config = replace(config, input=replace(config.input, img_size=model.config.img_size))
    return task_type(method)().objective(model, config, np.zeros((images, 0), np.float32))


def pictures(count: int = 6, config: Any = VIT, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, config.channels, *config.img_size, generator=torch.Generator().manual_seed(seed))


def batch(images: torch.Tensor, local: torch.Tensor | None = None, views: int = 1) -> Batch:
    count = len(images) // views
    return Batch(images, torch.zeros(count, 0), torch.arange(count), local)
