"""BiT formats: timm, Hugging Face's `BitForImageClassification`, and the authors' `.npz` files.

All have the same tensors. Hugging Face's head is a matrix; the authors count from 1 and store kernels output last.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from vitrail.config import Ints
from vitrail.errors import UserError
from vitrail.models.bit import CONFIGS, BiTConfig
from vitrail.weights.formats import HALF, Format, FormatSpec, check_match, from_stages, tensor_shape, to_stages
from vitrail.weights.key_tables import count_blocks, inverse, new_name
from vitrail.weights.sidecar import Sidecar

_BLOCK = re.compile(r"layers\.(\d+)\.blocks\.(\d+)\.")

_HF = {"stem.conv": "embedder.convolution", "head.fc": "classifier.1"}
_HF_BLOCK = re.compile(r"^encoder\.stages\.(\d+)\.layers\.")
_HF_KIND = {
    "layer_type": "preactivation",
    "global_padding": None,
    "embedding_dynamic_padding": False,
    "hidden_act": "relu",
}

_NPZ = {
    "stem.conv.weight": "root_block/standardized_conv2d/kernel",
    "norm.weight": "group_norm/gamma",
    "norm.bias": "group_norm/beta",
    "head.fc.weight": "head/conv2d/kernel",
    "head.fc.bias": "head/conv2d/bias",
}
_NPZ_UNIT = {
    "norm1.weight": "a/group_norm/gamma",
    "norm1.bias": "a/group_norm/beta",
    "conv1.weight": "a/standardized_conv2d/kernel",
    "downsample.conv.weight": "a/proj/standardized_conv2d/kernel",
    "norm2.weight": "b/group_norm/gamma",
    "norm2.bias": "b/group_norm/beta",
    "conv2.weight": "b/standardized_conv2d/kernel",
    "norm3.weight": "c/group_norm/gamma",
    "norm3.bias": "c/group_norm/beta",
    "conv3.weight": "c/standardized_conv2d/kernel",
}
_NPZ_BLOCK = re.compile(r"block(\d+)/unit(\d+)/")

_USUAL_GROUPS = 32


def _read_hf(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    table = inverse(_HF)
    state = {new_name(_HF_BLOCK.sub(r"layers.\1.blocks.", name), table): tensors[name] for name in tensors}
    if "head.fc.weight" in state:
        state["head.fc.weight"] = state["head.fc.weight"][:, :, None, None]
    return state


def _write_hf(state: Mapping[str, Tensor], _: BiTConfig) -> dict[str, Tensor]:
    named = {new_name(_BLOCK.sub(r"encoder.stages.\1.layers.\2.", name), _HF): value for name, value in state.items()}
    named["classifier.1.weight"] = named["classifier.1.weight"].flatten(1)
    return {name if name.startswith("classifier.") else f"bit.{name}": value for name, value in named.items()}


def _read_npz(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    top, unit = inverse(_NPZ), inverse(_NPZ_UNIT)
    state = {}
    for name in tensors:
        if block := _NPZ_BLOCK.match(name):
            rest = name[block.end() :]
            new = f"layers.{int(block[1]) - 1}.blocks.{int(block[2]) - 1}.{unit.get(rest, rest)}"
        else:
            new = top.get(name, name)
        value = tensors[name]
        state[new] = value.permute(3, 2, 0, 1) if value.ndim == 4 else value
    return state


def _write_npz(state: Mapping[str, Tensor], _: BiTConfig) -> dict[str, Tensor]:
    named = {}
    for name, value in state.items():
        if block := _BLOCK.match(name):
            new = f"block{int(block[1]) + 1}/unit{int(block[2]) + 1:02}/{_NPZ_UNIT[name[block.end() :]]}"
        else:
            new = _NPZ[name]
        named[f"resnet/{new}"] = value.permute(2, 3, 1, 0).contiguous() if value.ndim == 4 else value
    return named


def _unsupported_npz(config: BiTConfig) -> str | None:
    return None if config.shrink else "a stem without downsampling"


def _unsupported(config: BiTConfig) -> str | None:
    return _unsupported_npz(config) or uneven(config.widths)


def uneven(widths: Ints) -> str | None:
    """A width that timm and Hugging Face cannot represent: they round a quarter of it to a multiple of 8."""
    return next((f"a stage of width {width}, not a multiple of 32" for width in widths if width % 32), None)


_DEFAULTS = replace(HALF, crop=0.875, interpolation="bilinear")
FORMATS: dict[Format, FormatSpec] = {
    "timm": FormatSpec(
        r"(?:stages|layers)\.0\.blocks\.0\.conv3\.weight", from_stages, to_stages, _unsupported, _DEFAULTS
    ),
    "hf": FormatSpec(r"encoder\.stages\.0\.layers\.0\.conv3\.weight", _read_hf, _write_hf, _unsupported, _DEFAULTS),
    "npz": FormatSpec(r"root_block/standardized_conv2d/kernel", _read_npz, _write_npz, _unsupported_npz, _DEFAULTS),
}


def architecture(where: str, state: Mapping[str, Tensor], sidecar: Sidecar, model: BiTConfig | None) -> BiTConfig:
    """The configuration, from tensor shapes; these do not show the groups, and fit any image size."""
    _, channels, kernel, _ = tensor_shape(where, "BiT", state, "stem.conv.weight", 4)
    widths, depths = stages(where, "BiT", state, "layers")
    if model is not None:
        check_match(where, {"widths": widths, "depths": depths}, vars(model))
    shrink = kernel != 3
    listed = [c for c in CONFIGS.values() if (c.widths, c.depths, c.shrink) == (widths, depths, shrink)]
    similar = [model] if model is not None else listed
    return BiTConfig(
        widths=widths,
        depths=depths,
        shrink=shrink,
        groups=groups(where, "BiT", widths, sidecar, similar),
        img_size=sidecar.img_size or next((c.img_size for c in similar), (224, 224)),
        channels=channels,
        classes=tensor_shape(where, "BiT", state, "head.fc.weight", 4)[0] if "head.fc.weight" in state else 0,
    )


def stages(where: str, kind: str, state: Mapping[str, Tensor], place: str) -> tuple[Ints, Ints]:
    """The widths and depths of the ResNet stages under the prefix `place`."""
    count = count_blocks(state, rf"{re.escape(place)}\.(\d+)\.")
    widths = tuple(tensor_shape(where, kind, state, f"{place}.{i}.blocks.0.conv3.weight", 4)[0] for i in range(count))
    depths = tuple(count_blocks(state, rf"{re.escape(place)}\.{i}\.blocks\.(\d+)\.") for i in range(count))
    return widths, depths


def groups(where: str, kind: str, widths: Ints, sidecar: Sidecar, similar: Iterable[Any]) -> int:
    """The number of GroupNorm groups: from the sidecar, or from similar models, or the usual number."""
    known: int | None = sidecar.fields.get("groups") or next((config.groups for config in similar), None)
    if known is None and any(width % (4 * _USUAL_GROUPS) for width in widths):
        raise UserError(
            f"{where} is a {kind} whose tensors do not show the number of groups: the usual {_USUAL_GROUPS} do not "
            f"divide a quarter of the widths {widths}. Add a config.json to its folder, or give `model`."
        )
    return known or _USUAL_GROUPS


def hf_fields(document: Mapping[str, Any]) -> dict[str, Any]:
    """The number of groups, which tensors do not show."""
    check_hf(document, _HF_KIND)
    return {"groups": document.get("num_groups")}


def check_hf(document: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Rejects a ResNet `config.json` that our models do not support; missing fields default to those of a BiT."""
    for name, value in ours.items():
        theirs = document.get(name, _HF_KIND[name])
        if str(theirs).lower() != str(value).lower():
            raise UserError(f"Its {name} is {theirs!r}, but vitrail's models have {value!r}.")
    stages = len(document.get("depths", (3, 4, 6, 3)))
    if document.get("output_stride", 32) < _stride(stages):
        raise UserError(f"Its output_stride is {document['output_stride']}, but vitrail's models have no dilation.")


def hf_config(config: BiTConfig) -> dict[str, Any]:
    """The architecture for `config.json`."""
    return {"architectures": ["BitForImageClassification"], **hf_resnet(config, _HF_KIND)}


def hf_resnet(config: Any, kind: Mapping[str, Any]) -> dict[str, Any]:
    """The ResNet of a BiT or a hybrid for `config.json`."""
    return {
        "model_type": "bit",
        "embedding_size": config.first,
        "hidden_sizes": list(config.widths),
        "depths": list(config.depths),
        "num_groups": config.groups,
        "output_stride": _stride(len(config.widths)),
        **kind,
    }


def _stride(stages: int) -> int:
    """The output stride of a ResNet."""
    return 4 * 2 ** (stages - 1)
