"""Attention between all patches of an image, small enough to be sent to a browser.

Legend: H heads, N tokens, Q = h·w cells of the grid of a layer. Large grids are merged into cells of several patches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.explain.attention import watch
from vitrail.explain.geometry import Geometry, geometries
from vitrail.explain.windows import Windows
from vitrail.models import Model
from vitrail.models.position import Grid

Array = NDArray[np.float32]

MOST = 16 * 2**20  # numbers in all
_STEP = 16  # rows followed at a time through windows


@dataclass(frozen=True, eq=False)
class Between:
    """Attention of one layer: from the whole image (row 0) and from every cell to every cell."""

    grid: Grid
    weights: Array  # H 1+Q Q


def pairwise_attention(model: Model, image: Tensor, most: int = MOST) -> list[Between]:
    """Attention between all cells of one normalised image, (1, C, H, W), for every layer.

    Row 0 is the attention of the class token, or the mean over all patches, as in `attention_maps`. Patches are merged
    into larger cells if there would be more than `most` numbers.
    """
    layers = geometries(model)
    merged = next(by for by in (1, 2, 4, 8, 16, 32) if by == 32 or _numbers(layers, by) <= most)
    found: list[Between] = []

    def see(number: int, weights: Tensor) -> None:
        geometry = layers[number]
        cells = _cells(geometry.grid, merged).to(weights)
        queries = torch.nn.functional.pad(cells / cells.sum(dim=1, keepdim=True), (geometry.prefix, 0))
        rows = torch.cat([geometry.start[None].to(weights), queries])
        reached = _follow(geometry, rows, weights)[:, :, geometry.prefix :] @ cells.T
        found.append(Between(_merged(geometry.grid, merged), reached.cpu().numpy()))

    watch(model, image, see)
    return found


def _numbers(layers: list[Geometry], by: int) -> int:
    sizes = [(layer.heads, (grid := _merged(layer.grid, by))[0] * grid[1]) for layer in layers]
    return sum(heads * (cells + 1) * cells for heads, cells in sizes)


def _merged(grid: Grid, by: int) -> Grid:
    return -(-grid[0] // by), -(-grid[1] // by)


def _cells(grid: Grid, by: int) -> Tensor:
    """Which patches each cell has: (Q, h·w), of zeros and ones."""
    h, w = grid
    rows, columns = _merged(grid, by)
    cell = (torch.arange(h)[:, None] // by * columns + torch.arange(w) // by).flatten()
    return torch.nn.functional.one_hot(cell, rows * columns).T.float()


def _follow(geometry: Geometry, rows: Tensor, weights: Tensor) -> Tensor:
    """Attention from each of many weighted means of tokens, `rows` (R, N), in one image: (H, R, N)."""
    if isinstance(geometry, Windows):
        parts = [geometry.follow(part, weights) for part in torch.split(rows, _STEP)]
        return torch.cat(parts).transpose(0, 1)
    reached = rows @ weights[0]  # as `Tokens.follow`, but without a copy of the weights for each row
    return reached if geometry.areas is None else reached @ geometry.areas.to(weights)
