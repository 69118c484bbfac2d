"""Foreign weight formats, one module per model family.

The module of a family has
- `FORMATS`: its foreign formats. The first whose marker matches a tensor name is used, so their order matters;
- `architecture(where, state, sidecar, model)`: the configuration, from the shapes of tensors under our names. What
  shapes do not show (heads, groups, image size) comes from `sidecar`, `model` or the published models; if none of them
  has it, a UserError. The caller checks that the rest matches `model`. `classes` is 0 if there is no head;
- for Hugging Face formats, `hf_fields(document)`: the configuration fields that only `config.json` has, and
  `hf_config(config)`: the architecture as `config.json` describes it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from vitrail.data.preprocess import IMAGENET_MEAN, IMAGENET_STD, Resizing
from vitrail.errors import UserError
from vitrail.models.layers import Activation
from vitrail.models.position import Interpolation

Format = Literal["timm", "hf", "npz", "big_vision", "torchvision", "mmseg", "original", "vitrail"]


@dataclass(frozen=True)
class ImageDefaults:
    """The preprocessing assumed for published weights that have no sidecar files."""

    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)
    crop: float = 0.9  # below 384 pixels; 1 from there
    interpolation: Resizing = "bicubic"


HALF = ImageDefaults()
IMAGENET = ImageDefaults(IMAGENET_MEAN, IMAGENET_STD)
CLIP = ImageDefaults((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711), crop=1.0)


def _nothing(_: Any) -> None:
    return None


@dataclass(frozen=True)
class FormatSpec:
    """How a foreign format stores a family's tensors."""

    marker: str  # regular expression for a tensor name, without prefix, that identifies the format
    read: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]  # theirs -> ours; also works on the meta device
    write: Callable[[Mapping[str, Tensor], Any], dict[str, Tensor]] | None = None  # ours, config -> theirs
    unsupported: Callable[[Any], str | None] = _nothing  # the feature of a config that the format cannot represent
    defaults: ImageDefaults = HALF
    eps: float = 1e-6  # LayerNorm epsilon of our model, if its config has none; sidecar files may specify another
    act: Activation = "gelu"  # of their code, unless a sidecar file specifies another
    resample: Interpolation | None = None  # of positions in their code; None is the family's usual way
    task: str = "multiclass"  # of models with a head


def pattern(config: Any) -> str | None:
    """The attention pattern of a ViT-like model, which no other library has."""
    return None if config.attention == "global" else f"the attention pattern '{config.attention}'"


def identity(tensors: Mapping[str, Tensor], _: Any = None) -> dict[str, Tensor]:
    """For formats that use our names."""
    return dict(tensors)


def from_stages(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """timm's `stages` under our name `layers`: `stages` is a method of our models."""
    return {re.sub(r"^stages\.", "layers.", name): tensors[name] for name in tensors}


def to_stages(state: Mapping[str, Tensor], _: Any = None) -> dict[str, Tensor]:
    """The inverse of `from_stages`."""
    return {re.sub(r"^layers\.", "stages.", name): value for name, value in state.items()}


def tensor_shape(where: str, kind: str, state: Mapping[str, Tensor], name: str, dimensions: int) -> tuple[int, ...]:
    """The shape of a tensor that every model of a `kind` has, with a given number of dimensions."""
    if name not in state:
        raise UserError(f"{where} is not a complete {kind}: {name} is missing.")
    shape = tuple(state[name].shape)
    if len(shape) != dimensions or min(shape) < 1:
        raise UserError(f"{where} is not a {kind}: {name} is {shape}, but it must have {dimensions} dimensions.")
    return shape


def check_match(where: str, seen: Mapping[str, Any], requested: Mapping[str, Any]) -> None:
    """Raises a UserError if the weights differ from the requested `model`."""
    for name, value in seen.items():
        if requested[name] != value:
            raise UserError(f"{where} has {name} {value}, but `model` has {requested[name]}.")
