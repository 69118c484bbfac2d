"""What others call the tensors of each family: one module per family, in the same form as `weights/vit.py` for ViTs.

A module of a family has
- `LAYOUTS`: how each format lays out its tensors. The first whose marker is found is taken, so order may tell apart
  what one name cannot;
- `architecture(where, state, beside, model)`: the configuration that tensors under our names show. What they do not
  show (heads, groups, the image size) is as `beside` says, or `model`, or as usual; else it is a UserError. Whether the
  rest of `model` fits is compared by the caller; `classes` is 0 where there is no head;
- where there is a layout of Hugging Face's, `hf_settings(document)`: fields of the configuration that a `config.json`
  tells and tensors do not, and `hf_document(config)`: what a `config.json` must say of the architecture.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from vitrail.data.preprocess import IMAGENET_MEAN, IMAGENET_STD, Resizing
from vitrail.errors import UserError

Format = Literal["timm", "hf", "npz", "torchvision", "original", "vitrail"]


@dataclass(frozen=True)
class Habit:
    """How images are prepared for published weights, where nothing beside them says it."""

    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)
    crop: float = 0.9  # below 384 pixels; from there on it is 1
    interpolation: Resizing = "bicubic"


HALF = Habit()
IMAGENET = Habit(IMAGENET_MEAN, IMAGENET_STD)


def _nothing(_: Any) -> None:
    return None


@dataclass(frozen=True)
class Layout:
    """How one of the other formats lays out a family's tensors."""

    marker: str  # a regular expression for the name of a tensor, without prefix, by which the format is known
    read: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]  # theirs -> ours, on the meta device too
    write: Callable[[Mapping[str, Tensor], Any], dict[str, Tensor]] | None = None  # ours, config -> theirs
    cannot: Callable[[Any], str | None] = _nothing  # what of a config the format has no place for
    habit: Habit = HALF
    eps: float = 1e-6  # of LayerNorm in our model, where files of the format may tell another one


def same(tensors: Mapping[str, Tensor], _: Any = None) -> dict[str, Tensor]:
    """Tensors whose names are ours."""
    return dict(tensors)


def from_stages(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """timm's names where its stages are our layers: `stages` is a method of every model here."""
    return {re.sub(r"^stages\.", "layers.", name): tensors[name] for name in tensors}


def to_stages(state: Mapping[str, Tensor], _: Any = None) -> dict[str, Tensor]:
    """The inverse of `from_stages`."""
    return {re.sub(r"^layers\.", "stages.", name): value for name, value in state.items()}


def sizes(where: str, kind: str, state: Mapping[str, Tensor], name: str, dimensions: int) -> tuple[int, ...]:
    """The shape of a tensor that a `kind` of model must have, with so many dimensions."""
    if name not in state:
        raise UserError(f"{where} is no whole {kind}: {name} is missing.")
    shape = tuple(state[name].shape)
    if len(shape) != dimensions or min(shape) < 1:
        raise UserError(f"{where} is no {kind}: {name} is {shape}, but it must have {dimensions} dimensions.")
    return shape


def compare(where: str, seen: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Refuses what is seen of weights if it is not as `model` has it."""
    for name, value in seen.items():
        if asked[name] != value:
            raise UserError(f"{where} has {name} {value}, but `model` asks for {asked[name]}.")
