"""What a model has learned about where patches are: its position embeddings, or its relative biases."""

from __future__ import annotations

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vitrail.errors import UserError
from vitrail.explain.geometry import original
from vitrail.models.coatnet import CoAtNet, RelPos
from vitrail.models.hybrid import Hybrid
from vitrail.models.position import Grid, RelativeBias
from vitrail.models.pvt import PVT
from vitrail.models.swin import Swin, WindowAttention
from vitrail.models.vit import ViT

Array = NDArray[np.float32]


def position_similarity(model: ViT | Hybrid) -> Array:
    """Cosine similarities of the position embeddings of all pairs of patches: (h, w, h, w), figure 7 of the paper."""
    model = original(model)
    positions = model.pos_embed if isinstance(model, Hybrid) else model.positions()
    if positions is None:
        if isinstance(model, ViT) and model.config.pos == "relative":
            raise UserError("Positions are relative, so no patch has an embedding of its place: see the bias tables.")
        raise UserError("There are no position embeddings to compare: the model was made without positions.")
    return _similarity(positions, model.config.grid)


def stage_similarities(model: PVT) -> list[Array]:
    """The same for every stage of a PVT, each of which has positions and a grid (h, w) of its own."""
    return [
        _similarity(model.get_parameter(f"pos_embed{i}"), grid) for i, grid in enumerate(model.config.grids, start=1)
    ]


def _similarity(positions: Tensor, grid: Grid) -> Array:
    """Of positions (1, N, D) those of the patches, which come last."""
    rows = F.normalize(positions.detach()[0, -grid[0] * grid[1] :].float(), dim=-1)
    return (rows @ rows.T).reshape(*grid, *grid).cpu().numpy()


def relative_bias(model: ViT) -> Array:
    """What relative positions add to the attention logits of each layer and head: (L, H, 2h-1, 2w-1).

    By the place of the patch that is looked at: the centre is the patch that looks, above it is what lies above.
    """
    tables = [module.table for module in model.modules() if isinstance(module, RelativeBias)]
    if not tables:
        raise UserError("There are no relative biases: the model's positions are not relative.")
    return np.stack([_around(table, model.config.grid) for table in tables])


def stage_biases(model: Swin | CoAtNet) -> dict[int, Array]:
    """The same for every stage that has biases, by its number from 1: offsets in a window, or in the stage's map."""
    found: dict[int, Array] = {}
    for number, layer in enumerate(model.layers, start=1):
        tables = [
            _around(module.relative_position_bias_table, _grid(module))
            for module in layer.modules()
            if isinstance(module, WindowAttention | RelPos)
        ]
        if tables:
            found[number] = np.stack(tables)
    return found


def _grid(module: WindowAttention | RelPos) -> Grid:
    return module.grid if isinstance(module, RelPos) else (module.window, module.window)


def _around(table: Tensor, grid: Grid) -> Array:
    """A table (offsets, H) as maps (H, 2h-1, 2w-1) around the patch that looks; rows of prefix tokens are left out."""
    h, w = 2 * grid[0] - 1, 2 * grid[1] - 1
    # A table counts from the patch that is looked at to the one that looks: turned round, it is a map.
    return table.detach()[: h * w].T.reshape(-1, h, w).flip(-2, -1).float().cpu().numpy()
