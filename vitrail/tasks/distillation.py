"""Distillation settings of tasks without one class per image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vitrail.config import TrainConfig, override
from vitrail.errors import UserError


def soft_distillation(config: TrainConfig, given: Mapping[str, Any]) -> TrainConfig:
    """Soft distillation, because a hard label is one class per image."""
    if config.distillation.teacher is None:
        return config
    if given.get("distill") == "hard":
        raise UserError("--distill hard needs one class per image. Use --distill soft.")
    return override(config, {"distill": "soft"})
