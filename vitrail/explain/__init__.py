"""Explaining a model: attention, class relevance, position embeddings, filters, nearest neighbours.

The functions take a model and a normalised batch (B, C, H, W) on the model's device, and return NumPy arrays.
"""

from __future__ import annotations

from vitrail.explain.attention import (
    attention_distance,
    attention_maps,
    patch_attention,
    rollout,
    watch,
    window_attention,
)
from vitrail.explain.embedding_map import embedding_map
from vitrail.explain.faithfulness import faithfulness
from vitrail.explain.filters import conv_filters, patch_filters
from vitrail.explain.mixing import mixing_maps
from vitrail.explain.neighbours import neighbours
from vitrail.explain.positions import position_similarity, relative_bias, stage_biases, stage_similarities
from vitrail.explain.relevance import relevance

__all__ = [
    "attention_distance",
    "attention_maps",
    "conv_filters",
    "embedding_map",
    "faithfulness",
    "mixing_maps",
    "neighbours",
    "patch_attention",
    "patch_filters",
    "position_similarity",
    "relative_bias",
    "relevance",
    "rollout",
    "stage_biases",
    "stage_similarities",
    "watch",
    "window_attention",
]
