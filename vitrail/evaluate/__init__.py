"""Evaluation: a model's predictions, and its features by k-NN, linear and few-shot probes."""

from __future__ import annotations

from vitrail.evaluate.probes import fewshot, knn, linear

__all__ = ["fewshot", "knn", "linear"]
