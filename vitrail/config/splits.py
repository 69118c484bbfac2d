"""The settings that `open_data` needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Settings that determine which images are in which split.
_SPLIT = (
    *("val", "val_fraction", "folds", "fold", "seed", "task", "streaming", "tokenizer", "context"),
    *("data_dir", "image_dir", "image_column", "label_column", "max_pixels", "mask_values", "cache_gb"),
)


def split_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, by flat name, that determine which images are in which split."""
    return {name: settings[name] for name in _SPLIT if settings.get(name) is not None}
