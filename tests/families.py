"""The smallest models of every family, with three classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peers import randomise
from torch import Tensor

from vitrail.data.preprocess import Preprocess
from vitrail.models import CONFIGS, Model, ModelConfig, build, family
from vitrail.models.bit import BiTConfig
from vitrail.models.coatnet import CoAtNetConfig
from vitrail.models.hybrid import HybridConfig
from vitrail.models.mixer import MixerConfig
from vitrail.models.pvt import PVTConfig
from vitrail.models.pvt_v2 import PVTv2Config
from vitrail.models.swin import SwinConfig
from vitrail.models.swin_v2 import SwinV2Config
from vitrail.models.vit import ViTConfig
from vitrail.tasks import Multiclass
from vitrail.weights import Card, save

BACKBONES = tuple(dict.fromkeys(map(family, CONFIGS.values())))  # all families but those with dense heads or two towers
SIZE: dict[str, Any] = {"img_size": (16, 8), "channels": 1, "classes": 3}
TINY = {
    "bit": BiTConfig((32, 64), (1, 1), shrink=False, groups=8, **SIZE),
    "mixer": MixerConfig(16, 5, 12, 16, 4, **SIZE),
    "swin": SwinConfig((16, 32), (2, 1), (2, 4), window=2, patch=2, **SIZE),
    "swin_v2": SwinV2Config((16, 32), (2, 1), (2, 4), window=2, patch=2, **SIZE),
    "pvt": PVTConfig((16, 32), (1, 2), (1, 2), (2, 2), (2, 1), patch=2, **SIZE),
    "pvt_v2": PVTv2Config((16, 32), (1, 2), (1, 2), (2, 2), (2, 1), patch=2, **SIZE),
    "coatnet": CoAtNetConfig((16, 32), (1, 2), 8, convs=1, shrink=False, **SIZE),
    "hybrid": HybridConfig(32, 2, 2, 32, (32,), (1,), first=8, groups=8, **SIZE),
}

SMALL = {"channels": 1, "classes": 3}
PYRAMID = ((8, 12), (2, 2), (2, 3), (2, 2))
ATTENTIVE: dict[str, ModelConfig] = {
    "hybrid": HybridConfig(16, 2, 2, 32, (32,), (1,), first=8, groups=8, img_size=(16, 24), **SMALL),
    "vit, windows": ViTConfig(16, 2, 2, 32, 2, img_size=(10, 14), attention="window:3,shift", **SMALL),
    "vit, axial": ViTConfig(16, 2, 2, 32, 2, img_size=(10, 14), attention="axial", **SMALL),
    "swin": SwinConfig((8, 12), (2, 2), (2, 3), window=4, patch=2, img_size=(16, 24), **SMALL),
    "swin, padded": SwinConfig((8, 12), (2, 2), (2, 3), window=4, patch=2, img_size=(28, 22), **SMALL),
    "swin_v2, padded": SwinV2Config((8, 12), (2, 2), (2, 3), window=4, patch=2, img_size=(28, 22), **SMALL),
    "pvt": PVTConfig(*PYRAMID, (2, 1), patch=2, img_size=(16, 24), **SMALL),
    "pvt_v2": PVTv2Config(*PYRAMID, (3, 1), patch=2, img_size=(15, 22), **SMALL),
    "pvt_v2, linear": PVTv2Config(*PYRAMID, (1, 1), linear=True, patch=2, img_size=(18, 20), **SMALL),
    "coatnet": CoAtNetConfig((32, 32, 64), (1, 2, 1), 8, convs=1, shrink=False, img_size=(15, 22), **SMALL),
}


def build_tiny(name: str) -> Any:
    return randomise(build(TINY[name])).eval()


def pictures(count: int = 2) -> Tensor:
    return torch.randn(count, 1, 16, 8, generator=torch.Generator().manual_seed(1))


def batch(model: Model, count: int = 2) -> Tensor:
    shape = (count, model.config.channels, *model.config.img_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def model_file(folder: Path, model: Model) -> Path:
    """Saves a model with three classes as a weights file."""
    task, preprocess = Multiclass(("a", "b", "c")), Preprocess(model.config.img_size, 1)
    card = Card(model=f"{family(model.config)}_nano", config=model.config, task=task, preprocess=preprocess)
    save(folder / "model.safetensors", model, card)
    return folder / "model.safetensors"
