"""Evaluation: a model's predictions, and its features by k-NN, linear and few-shot probes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitrail.evaluate.probes import fewshot, knn, linear

__all__ = ["fewshot", "knn", "linear"]


def __getattr__(name: str) -> Any:  # imported on first use, because predictions do not need the probes
    if name in __all__:
        from vitrail.evaluate import probes

        return getattr(probes, name)
    raise AttributeError(f"module 'vitrail.evaluate' has no attribute '{name}'")
