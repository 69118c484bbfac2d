"""Sidecar files of foreign weights, `config.json` and `preprocessor_config.json`: what the tensors do not show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from vitrail import files
from vitrail.config import Size, coerce
from vitrail.data.preprocess import Preprocess, Resizing
from vitrail.errors import UserError
from vitrail.models.vit import ViTConfig


@dataclass(frozen=True)
class Sidecar:
    """What the sidecar files specify; None where they do not."""

    fields: Mapping[str, Any] = field(default_factory=dict)  # of the model configuration: heads, groups
    img_size: Size | None = None
    classes: tuple[str, ...] = ()
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    crop: float | None = None
    interpolation: Resizing | None = None
    eps: float | None = None  # of LayerNorm
    text: Mapping[str, Any] = field(default_factory=dict)  # about the text tower

    def __post_init__(self) -> None:
        """Coerces JSON values to the types of the configuration."""
        checked: dict[str, Any] = {
            "img_size": None if self.img_size is None else coerce(ViTConfig, "img_size", self.img_size),
            "classes": tuple(map(str, self.classes)),
            "mean": None if self.mean is None else coerce(Preprocess, "mean", self.mean),
            "std": None if self.std is None else coerce(Preprocess, "std", self.std),
            "crop": None if self.crop is None else coerce(Preprocess, "crop", self.crop),
            "interpolation": self.interpolation if self.interpolation in get_args(Resizing) else None,
        }
        checked["eps"] = None if self.eps is None else float(self.eps)
        for name, value in checked.items():
            object.__setattr__(self, name, value)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no file."""
    if not path.exists():
        return {}
    document = files.read_json(path)
    if not isinstance(document, dict):
        raise UserError(f"{path} must contain a JSON object, but it contains a {type(document).__name__}.")
    return document
