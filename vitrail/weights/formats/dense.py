"""Formats of models with a dense head: mmsegmentation's of masks, and YOLOS of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vitrail.models.dense import HEAD, DenseConfig
from vitrail.weights.formats import Format, FormatSpec, mmseg, yolos
from vitrail.weights.sidecar import Sidecar

FORMATS: dict[Format, FormatSpec] = mmseg.FORMATS | yolos.FORMATS

hf_fields, hf_config = yolos.hf_fields, yolos.hf_config


def architecture(where: str, state: Mapping[str, Tensor], sidecar: Sidecar, model: Any) -> DenseConfig:
    """The configuration, from tensor shapes."""
    kind = yolos if f"{HEAD}det_token" in state else mmseg
    config: DenseConfig = kind.architecture(where, state, sidecar, model)
    return config
