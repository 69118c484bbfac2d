"""Input weights of a Mixer's token-mixing MLPs, as maps of patches.

Legend: L layers, U hidden units, (h, w) the grid of patches.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vitrail.errors import UserError
from vitrail.models import Model

Array = NDArray[np.float32]


def mixing_maps(model: Model) -> Array:
    """Input weights of the hidden units of the token-mixing MLPs: (L, U, h, w), figure 5 of the Mixer paper."""
    layers = model.mixing()
    if not layers:
        raise UserError(f"There are no token-mixing weights: a {type(model).__name__} has no token-mixing MLPs.")
    weights = np.stack([layer.detach().float().cpu().numpy() for layer in layers])
    return weights.reshape(*weights.shape[:2], *model.config.grid)


def in_pairs(maps: Array, count: int = 64) -> NDArray[np.int64]:
    """Indices of the units of one layer, (U, h, w), with the largest norm, at most `count`, in pairs.

    As in the paper, units that are closest to each other's negative are paired, and pairs are sorted from low to high
    frequency. An unpaired unit comes last.
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
    """The power-weighted mean frequency of maps (U, h, w), in cycles per patch."""
    power = np.abs(np.fft.fft2(maps)) ** 2
    y, x = (np.fft.fftfreq(side) for side in maps.shape[1:])
    return (power * np.hypot(y[:, None], x)).sum(axis=(1, 2)) / np.maximum(power.sum(axis=(1, 2)), 1e-12)
