"""What a model has learned about where patches are: its position embeddings, or its relative biases."""

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

NO_POSITIONS = "There are no position embeddings or biases to draw: the model is without positions."


def position_similarity(model: Model) -> Array:
    """Cosine similarities of the position embeddings of all pairs of patches: (h, w, h, w), figure 7 of the paper."""
    model = original(model)
    for positions, grid in model.position_embeddings():
        return _similarity(positions, grid)
    if model.bias_tables():
        raise UserError("Positions are relative, so no patch has an embedding of its place: see the bias tables.")
    raise UserError("There are no position embeddings to compare: the model was made without positions.")


def stage_similarities(model: Model) -> list[Array]:
    """The same for every stage that has positions, as those of a PVT, each of which has a grid (h, w) of its own."""
    return [_similarity(positions, grid) for positions, grid in original(model).position_embeddings()]


def _similarity(positions: Tensor, grid: Grid) -> Array:
    """Of positions (1, N, D) those of the patches, which come last."""
    rows = F.normalize(positions.detach()[0, -grid[0] * grid[1] :].float(), dim=-1)
    return (rows @ rows.T).reshape(*grid, *grid).cpu().numpy()


def relative_bias(model: Model) -> Array:
    """What relative positions add to the attention logits of each layer and head: (L, H, 2h-1, 2w-1).

    By the place of the patch that is looked at: the centre is the patch that looks, above it is what lies above.
    """
    for tables in stage_biases(model).values():
        return tables
    raise UserError("There are no relative biases: the model's positions are not relative.")


def stage_biases(model: Model) -> dict[int, Array]:
    """The same for every stage that has biases, by its number from 1: offsets in a window, or in the stage's map."""
    tables = original(model).bias_tables()
    return {number: np.stack([_around(table, grid) for table, grid in found]) for number, found in tables.items()}


def _around(table: Tensor, grid: Grid) -> Array:
    """A table (offsets, H) as maps (H, 2h-1, 2w-1) around the patch that looks; rows of prefix tokens are left out."""
    h, w = 2 * grid[0] - 1, 2 * grid[1] - 1
    # A table counts from the patch that is looked at to the one that looks: turned round, it is a map.
    return table.detach()[: h * w].T.reshape(-1, h, w).flip(-2, -1).float().cpu().numpy()
