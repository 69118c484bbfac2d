"""Seeing what a model sees: `vitrail.explain(run, images)` is `vitrail explain RUN IMAGES…`.

Its parts take a model and a normalised batch (B, C, H, W) on the model's device, and give arrays.
"""

from __future__ import annotations

from vitrail.explain.attention import attention_distance, attention_maps, patch_attention, rollout, watch
from vitrail.explain.filters import patch_filters
from vitrail.explain.positions import position_similarity, relative_bias

__all__ = [
    "attention_distance",
    "attention_maps",
    "patch_attention",
    "patch_filters",
    "position_similarity",
    "relative_bias",
    "rollout",
    "watch",
]
