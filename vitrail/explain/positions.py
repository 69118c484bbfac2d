"""Position embeddings and relative position biases."""

from __future__ import annotations

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vitrail.errors import UserError
from vitrail.explain.geometry import original
from vitrail.models import Model
from vitrail.models.position import Grid

Array = NDArray[np.float32]

NO_POSITIONS = "There are no position embeddings or biases: the model has no positions."


def position_similarity(model: Model) -> Array:
    """Cosine similarities of the position embeddings of all patches: (h, w, h, w), figure 7 of the ViT paper."""
    model = original(model)
    for positions, grid in model.position_embeddings():
        return _similarity(positions, grid)
    if model.bias_tables():
        raise UserError("There are no position embeddings: positions are relative. Use relative_bias instead.")
    raise UserError("There are no position embeddings: the model has no positions.")


def stage_similarities(model: Model) -> list[Array]:
    """`position_similarity` of every stage with position embeddings; those of a PVT differ in their grid (h, w)."""
    return [_similarity(positions, grid) for positions, grid in original(model).position_embeddings()]


def _similarity(positions: Tensor, grid: Grid) -> Array:
    """Cosine similarities (h, w, h, w) of positions (1, N, D), of which the patches come last."""
    rows = F.normalize(positions.detach()[0, -grid[0] * grid[1] :].float(), dim=-1)
    return (rows @ rows.T).reshape(*grid, *grid).cpu().numpy()


def relative_bias(model: Model) -> Array:
    """Relative position biases of the attention logits of each layer and head: (L, H, 2h-1, 2w-1).

    Maps are indexed by the key's offset: the query is at the centre, keys above it are above.
    """
    for tables in stage_biases(model).values():
        return tables
    raise UserError("There are no relative position biases: the model's positions are not relative.")


def stage_biases(model: Model) -> dict[int, Array]:
    """`relative_bias` of every stage with biases, by number from 1; offsets are within a window or the stage's map."""
    tables = original(model).bias_tables()
    return {number: np.stack([_around(table, grid) for table, grid in found]) for number, found in tables.items()}


def _around(table: Tensor, grid: Grid) -> Array:
    """A table (offsets, H) as maps (H, 2h-1, 2w-1) around the query, without the rows of prefix tokens."""
    h, w = 2 * grid[0] - 1, 2 * grid[1] - 1
    # Tables are indexed by query minus key; flipped, by key minus query.
    return table.detach()[: h * w].T.reshape(-1, h, w).flip(-2, -1).float().cpu().numpy()
