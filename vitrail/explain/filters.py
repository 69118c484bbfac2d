"""Filters of the first layer: principal components of a patch embedding, or those of a convolution."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import nn

from vitrail.errors import UserError
from vitrail.models import Model
from vitrail.models.bit import StdConv

Array = NDArray[np.float32]


def patch_filters(model: Model, count: int = 28) -> Array:
    """The first principal components of the patch filters, (count, p, p, C), of unit norm; figure 7 of the ViT paper.

    Fewer if a patch has fewer values or the model is narrower. The sign is chosen so that the largest value is
    positive.
    """
    if not reads_patches(model):
        raise UserError(
            "There are no patch filters: the model has no patch embedding, its first convolution overlaps. "
            "Use conv_filters instead."
        )
    weight = _first(model).weight.detach().double().cpu().numpy()  # D C p p
    flat = weight.reshape(len(weight), -1)
    flat = flat - flat.mean(axis=0)
    _, _, components = np.linalg.svd(flat, full_matrices=False)
    components = components[: min(count, len(weight) - 1)]
    largest = np.take_along_axis(components, np.abs(components).argmax(axis=1)[:, None], axis=1)
    components = components * np.where(largest < 0, -1, 1)
    return components.reshape(-1, *weight.shape[1:]).transpose(0, 2, 3, 1).astype(np.float32)


def conv_filters(model: Model, count: int = 56) -> Array:
    """The filters of the first convolution as applied, (count, k, k, C), largest norm first.

    BiT and hybrids standardise their filters, so all norms are equal: these keep their order.
    """
    conv = _first(model)
    weight = (conv.filters() if isinstance(conv, StdConv) else conv.weight).detach().float()  # D C k k
    if not isinstance(conv, StdConv):
        weight = weight[weight.flatten(1).norm(dim=1).argsort(descending=True, stable=True)]
    return weight[:count].permute(0, 2, 3, 1).cpu().numpy()


@dataclass(frozen=True, eq=False)
class Filters:
    """Filters to show, (count, k, k, C), with a title and a description."""

    values: Array
    title: str
    kind: str


def first_filters(model: Model) -> Filters:
    """Principal components of the patch filters, or the filters of an overlapping convolution."""
    if reads_patches(model):
        return Filters(patch_filters(model), "Patch filters", "principal components")
    kind = "filters, standardised" if isinstance(_first(model), StdConv) else "filters by norm"
    return Filters(conv_filters(model), "Filters of the first convolution", kind)


def reads_patches(model: Model) -> bool:
    """Whether the first convolution is a patch embedding: its patches do not overlap."""
    conv = _first(model)
    return conv.kernel_size == conv.stride


def _first(model: Model) -> nn.Conv2d:
    """The first convolution."""
    if not (name := model.filters()):
        raise UserError("There are no filters to draw: the model has no convolution.")
    conv = model.get_submodule(name.removesuffix(".weight"))
    assert isinstance(conv, nn.Conv2d)
    return conv
