"""What a model has learned about where patches are: its position embeddings, or its relative biases."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from vitrail.errors import UserError
from vitrail.models.position import RelativeBias
from vitrail.models.vit import ViT

Array = NDArray[np.float32]


def position_similarity(model: ViT) -> Array:
    """Cosine similarities of the position embeddings of all pairs of patches: (h, w, h, w), figure 7 of the paper."""
    positions = model.positions()
    if positions is None:
        if model.config.pos == "relative":
            raise UserError("Positions are relative, so no patch has an embedding of its place: see the bias tables.")
        raise UserError("There are no position embeddings to compare: the model was made without positions.")
    grid = model.config.grid
    rows = F.normalize(positions.detach()[0, -grid[0] * grid[1] :].float(), dim=-1)
    return (rows @ rows.T).reshape(*grid, *grid).cpu().numpy()


def relative_bias(model: ViT) -> Array:
    """What relative positions add to the attention logits of each layer and head: (L, H, 2h-1, 2w-1).

    By the place of the patch that is looked at: the centre is the patch that looks, above it is what lies above.
    """
    tables = [module for module in model.modules() if isinstance(module, RelativeBias)]
    if not tables:
        raise UserError("There are no relative biases: the model's positions are not relative.")
    h, w = model.config.grid
    offsets = torch.stack([module.table.detach()[: (2 * h - 1) * (2 * w - 1)].T for module in tables])
    # A table counts from the patch that is looked at to the one that looks: turned round, it is a map.
    return offsets.reshape(*offsets.shape[:2], 2 * h - 1, 2 * w - 1).flip(-2, -1).float().cpu().numpy()
