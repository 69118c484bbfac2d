"""vitrail: the Vision Transformer as real software.

Every verb of the command line is a function of the same name here. They are imported on first use, so that
`import vitrail` is instant.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vitrail.errors import UserError
from vitrail.version import VERSION as __version__

if TYPE_CHECKING:
    from vitrail.evaluate.check import check
    from vitrail.evaluate.embed import embed
    from vitrail.evaluate.predict import predict
    from vitrail.evaluate.verbs import evaluate
    from vitrail.explain.verbs import explain
    from vitrail.export.verbs import export
    from vitrail.models import create
    from vitrail.report import report
    from vitrail.runs.predictor import Predictor
    from vitrail.train import train
    from vitrail.train.verbs import recipes
    from vitrail.weights import load
    from vitrail.weights.convert import convert

__all__ = [
    "Predictor",
    "UserError",
    "__version__",
    "check",
    "convert",
    "create",
    "embed",
    "evaluate",
    "explain",
    "export",
    "load",
    "predict",
    "recipes",
    "report",
    "train",
]

_HOME = {
    "Predictor": "vitrail.runs.predictor",
    "check": "vitrail.evaluate.check",
    "convert": "vitrail.weights.convert",
    "create": "vitrail.models",
    "embed": "vitrail.evaluate.embed",
    "load": "vitrail.weights",
    "predict": "vitrail.evaluate.predict",
    "recipes": "vitrail.train.verbs",
}
_PACKAGES = ("data", "evaluate", "explain", "export", "models", "report", "runs", "train", "weights")


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in _PACKAGES:
        return importlib.import_module(f"vitrail.{name}")
    raise AttributeError(f"module 'vitrail' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*__all__, *_PACKAGES})
