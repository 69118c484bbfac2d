"""The libraries that vitrail is compared with, and the random weights that it is compared on."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)


def timm(module: str = "timm") -> ModuleType:
    """timm, or a module of it."""
    _torchvision()
    return importlib.import_module(module)


def transformers() -> ModuleType:
    _torchvision()
    return importlib.import_module("transformers")


def randomise(model: M, seed: int = 0) -> M:
    """Adds noise to every parameter, so that none is zero or one: a part that is left out changes the output."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference, relative to the largest value."""
    assert ours.shape == theirs.shape
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def _torchvision() -> None:
    """Both peers import torchvision, whose compiled operators may not load beside a CPU build of torch.

    Neither uses them: a declaration of the two that the import itself asks for is enough.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in ("nms", "qnms"):
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{name}", schema)
