"""Distillation settings of tasks without one class per image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vitrail.config import TrainConfig, override
from vitrail.errors import UserError


def without_choice(config: TrainConfig, given: Mapping[str, Any]) -> TrainConfig:
    """Soft distillation, and no balanced sampling: both hard labels and balancing need one class per image."""
    if config.source.balanced_sampling:
        raise UserError("Balanced sampling needs one class per image. Leave out --balanced-sampling.")
    if config.distillation.teacher is None:
        return config
    if given.get("distill") == "hard":
        raise UserError("--distill hard needs one class per image. Use --distill soft.")
    return override(config, {"distill": "soft"})
