"""What a model's first layer looks for in a patch, or around every pixel."""

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
    """The first principal components of the patch filters, (count, p, p, C), of length one; figure 7 of the paper.

    There are fewer if a patch has fewer values, or the model less width. Components have no sign: their largest value
    is made positive.
    """
    if not reads_patches(model):
        raise UserError(
            "There are no patch filters: several convolutions read each patch, and no single filter shows what they do."
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
    """The filters of the first convolution as they are applied, (count, k, k, C), those with the largest norm first.

    BiT and the hybrid standardise their filters, which so have one norm: they come in their own order.
    """
    conv = _first(model)
    weight = (conv.filters() if isinstance(conv, StdConv) else conv.weight).detach().float()  # D C k k
    if not isinstance(conv, StdConv):
        weight = weight[weight.flatten(1).norm(dim=1).argsort(descending=True, stable=True)]
    return weight[:count].permute(0, 2, 3, 1).cpu().numpy()


@dataclass(frozen=True, eq=False)
class Filters:
    """What is shown of the first convolution, (count, k, k, C), its title, and what the filters are."""

    values: Array
    title: str
    kind: str


def first_filters(model: Model) -> Filters:
    """The components of patch filters, or else the filters themselves."""
    if reads_patches(model):
        return Filters(patch_filters(model), "Patch filters", "principal components")
    kind = "filters, standardised" if isinstance(_first(model), StdConv) else "filters by their norm"
    return Filters(conv_filters(model), "Filters of the first convolution", kind)


def reads_patches(model: Model) -> bool:
    """Whether the first convolution reads patches, none of which overlap, and not the surroundings of pixels."""
    conv = _first(model)
    return conv.kernel_size == conv.stride


def _first(model: Model) -> nn.Conv2d:
    """The first convolution."""
    conv = model.get_submodule(model.filters().removesuffix(".weight"))
    assert isinstance(conv, nn.Conv2d)
    return conv
