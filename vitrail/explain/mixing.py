"""What a Mixer's tokens are mixed by: the weights that the hidden units of its token-mixing MLPs give to the patches.

Legend: L layers, U hidden units, (h, w) the grid of patches.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vitrail.errors import UserError
from vitrail.models import Model

Array = NDArray[np.float32]


def mixing_maps(model: Model) -> Array:
    """The input weights of every hidden unit of the token-mixing MLPs as maps: (L, U, h, w), figure 5 of the paper."""
    layers = model.mixing()
    if not layers:
        raise UserError(f"There is no token mixing to show: a {type(model).__name__} has none.")
    weights = np.stack([layer.detach().float().cpu().numpy() for layer in layers])
    return weights.reshape(*weights.shape[:2], *model.config.grid)


def in_pairs(maps: Array, count: int = 64) -> NDArray[np.int64]:
    """The numbers of the units of one layer, (U, h, w), that are shown: those with the largest norm, at most `count`.

    Units that are most nearly each other's negative stand side by side, as in the paper, and the pairs go from low to
    high frequency. An odd one comes last.
    """
    flat = maps.reshape(len(maps), -1)
    norms = np.linalg.norm(flat, axis=1)
    chosen = np.argsort(-norms, kind="stable")[:count]
    unit = flat[chosen] / np.maximum(norms[chosen, None], 1e-12)
    cosine = unit @ unit.T
    np.fill_diagonal(cosine, np.inf)
    pairs = []
    for _ in range(len(chosen) // 2):
        pair = np.unravel_index(cosine.argmin(), cosine.shape)
        cosine[pair, :] = cosine[:, pair] = np.inf
        pairs.append(chosen[list(pair)])
    pairs.sort(key=lambda pair: float(_frequency(maps[pair]).sum()))
    odd = np.setdiff1d(chosen, pairs)
    return np.concatenate([*pairs, odd]).astype(np.int64)


def _frequency(maps: Array) -> NDArray[np.float64]:
    """The mean frequency of maps (U, h, w), in waves per patch, weighted by its power."""
    power = np.abs(np.fft.fft2(maps)) ** 2
    y, x = (np.fft.fftfreq(side) for side in maps.shape[1:])
    return (power * np.hypot(y[:, None], x)).sum(axis=(1, 2)) / np.maximum(power.sum(axis=(1, 2)), 1e-12)
