"""Measuring and predicting: `vitrail.evaluate(run)` is `vitrail evaluate RUN`."""

from __future__ import annotations

from vitrail.evaluate.probes import fewshot, knn, linear
from vitrail.evaluate.verbs import evaluate
from vitrail.verb import callable_package

__all__ = ["evaluate", "fewshot", "knn", "linear"]

callable_package(__name__, evaluate)
