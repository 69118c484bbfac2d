"""Formats of models with a dense head: mmsegmentation's of masks, and YOLOS and DETR of transformers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from torch import Tensor

from vitrail.models.dense import HEAD, DenseConfig
from vitrail.weights.formats import IMAGENET, Format, FormatSpec, detr, mmseg, yolos
from vitrail.weights.sidecar import Sidecar


def _read(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    is_detr = any(re.fullmatch(detr.MARKER, name) for name in tensors)
    return detr.read(tensors) if is_detr else yolos.read(tensors)


def _write(state: Mapping[str, Tensor], config: DenseConfig) -> dict[str, Tensor]:
    return _of(config).write(state, config)


def _unsupported(config: DenseConfig) -> str | None:
    return _of(config).unsupported(config)


def _of(config: DenseConfig) -> ModuleType:
    """The module that writes a model for transformers."""
    return detr if config.head == "detr" else yolos


FORMATS: dict[Format, FormatSpec] = mmseg.FORMATS | {
    "hf": FormatSpec(f"(?:{yolos.MARKER}|{detr.MARKER})", _read, _write, _unsupported, IMAGENET, task="boxes"),
}


def architecture(where: str, state: Mapping[str, Tensor], sidecar: Sidecar, model: Any) -> DenseConfig:
    """The configuration, from tensor shapes."""
    kinds = {"det_token": yolos, "query_position_embeddings.weight": detr}
    kind = next((module for name, module in kinds.items() if HEAD + name in state), mmseg)
    config: DenseConfig = kind.architecture(where, state, sidecar, model)
    return config


def hf_fields(document: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the backbone that only `config.json` has."""
    return detr.hf_fields(document)  # YOLOS has no others


def hf_config(config: DenseConfig) -> dict[str, Any]:
    """The architecture as `config.json` describes it."""
    document: dict[str, Any] = _of(config).hf_config(config)
    return document
