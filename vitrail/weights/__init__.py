"""Trained models as files: `model.safetensors` holds the tensors, `model.json` next to it everything else.

The names below come from `loading` and `sources` and are imported on first use: a model card is read without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vitrail.weights.card import WEIGHTS_FILE, Card

if TYPE_CHECKING:
    from vitrail.weights.loading import load, open_card, open_run, save, start_from
    from vitrail.weights.sources import Source, absolute, home, locate

__all__ = [
    "WEIGHTS_FILE",
    "Card",
    "Source",
    "absolute",
    "home",
    "load",
    "locate",
    "open_card",
    "open_run",
    "save",
    "start_from",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        place = "sources" if name in ("Source", "absolute", "home", "locate") else "loading"
        return getattr(importlib.import_module(f"vitrail.weights.{place}"), name)
    raise AttributeError(f"module 'vitrail.weights' has no attribute '{name}'")
