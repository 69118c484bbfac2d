"""Random numbers for the images of a batch, drawn for the whole batch however many processes share it."""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.world import world


def rand(*shape: int, generator: torch.Generator) -> Tensor:
    """Uniform random numbers from 0 to 1; the last dimension is that of the images."""
    *others, images = shape
    return world().drawn(lambda rows: torch.rand(*others, rows, generator=generator), images, dim=-1)


def randint(low: int, high: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Uniform random whole numbers from `low` to below `high`; the last dimension is that of the images."""
    *others, images = shape
    return world().drawn(lambda rows: torch.randint(low, high, (*others, rows), generator=generator), images, dim=-1)
