"""What a model's first layer looks for in a patch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vitrail.errors import UserError
from vitrail.models.vit import PatchEmbed, ViT

Array = NDArray[np.float32]


def patch_filters(model: ViT, count: int = 28) -> Array:
    """The first principal components of the patch filters, (count, p, p, C), of length one; figure 7 of the paper.

    There are fewer if a patch has fewer values, or the model less width. Components have no sign: their largest value
    is made positive.
    """
    stem = model.patch_embed
    if not isinstance(stem, PatchEmbed):
        raise UserError(
            "There are no patch filters: several convolutions read each patch, and no single filter shows what they do."
        )
    weight = stem.proj.weight.detach().double().cpu().numpy()  # D C p p
    filters = weight.reshape(len(weight), -1)
    filters = filters - filters.mean(axis=0)
    _, _, components = np.linalg.svd(filters, full_matrices=False)
    components = components[: min(count, len(weight) - 1)]
    largest = np.take_along_axis(components, np.abs(components).argmax(axis=1)[:, None], axis=1)
    components = components * np.where(largest < 0, -1, 1)
    return components.reshape(-1, *weight.shape[1:]).transpose(0, 2, 3, 1).astype(np.float32)
