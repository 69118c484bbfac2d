"""A small model with everything that a weights file and its card store."""

from __future__ import annotations

import torch

from vitrail.data.preprocess import Preprocess
from vitrail.models.vit import ViTConfig
from vitrail.tasks import Multiclass
from vitrail.weights import Card

CONFIG = ViTConfig(
    width=16, depth=2, heads=2, mlp=32, patch=2, img_size=(8, 12), channels=3, classes=3, pool="cls", registers=1
)
CLASSES = ("cat", "Hündin", "猫/鳥")
PREPROCESS = Preprocess((8, 12), 3, 0.9, mean=(0.4, 0.5, 0.6), std=(0.2,))


def card_of(config=CONFIG, classes=CLASSES, preprocess=PREPROCESS):
    return Card(
        model="vit_nano2", config=config, task=Multiclass(classes), preprocess=preprocess, metrics={"top1": 0.75}
    )


def images(config=CONFIG, count=2):
    return torch.randn(count, config.channels, *config.img_size, generator=torch.Generator().manual_seed(1))
