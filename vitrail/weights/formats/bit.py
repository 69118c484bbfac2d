"""BiTs in the formats of others: timm, Hugging Face's `BitForImageClassification`, and the authors' `.npz` files.

All have the same tensors. Hugging Face's head is a matrix; the authors count from 1, and store kernels with the output
last.
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
from vitrail.weights.formats import HALF, Format, Layout, compare, from_stages, sizes, to_stages
from vitrail.weights.key_tables import count_blocks, inverse, new_name
from vitrail.weights.sidecar import Beside

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


def _cannot_npz(config: BiTConfig) -> str | None:
    return None if config.shrink else "a stem that does not shrink the image"


def _cannot(config: BiTConfig) -> str | None:
    return _cannot_npz(config) or uneven(config.widths)


def uneven(widths: Ints) -> str | None:
    """What of a ResNet's widths timm and Hugging Face would round: they divide by 4, to multiples of 8."""
    return next((f"a stage of width {width}, which is no multiple of 32" for width in widths if width % 32), None)


_HABIT = replace(HALF, crop=0.875, interpolation="bilinear")
LAYOUTS: dict[Format, Layout] = {
    "timm": Layout(r"(?:stages|layers)\.0\.blocks\.0\.conv3\.weight", from_stages, to_stages, _cannot, _HABIT),
    "hf": Layout(r"encoder\.stages\.0\.layers\.0\.conv3\.weight", _read_hf, _write_hf, _cannot, _HABIT),
    "npz": Layout(r"root_block/standardized_conv2d/kernel", _read_npz, _write_npz, _cannot_npz, _HABIT),
}


def architecture(where: str, state: Mapping[str, Tensor], beside: Beside, model: BiTConfig | None) -> BiTConfig:
    """The architecture that tensors have, by their shapes: all but the groups, and the image size, which fits any."""
    _, channels, kernel, _ = sizes(where, "BiT", state, "stem.conv.weight", 4)
    widths, depths = stages(where, "BiT", state, "layers")
    if model is not None:
        compare(where, {"widths": widths, "depths": depths}, vars(model))
    shrink = kernel != 3
    listed = [c for c in CONFIGS.values() if (c.widths, c.depths, c.shrink) == (widths, depths, shrink)]
    alike = [model] if model is not None else listed
    return BiTConfig(
        widths=widths,
        depths=depths,
        shrink=shrink,
        groups=groups(where, "BiT", widths, beside, alike),
        img_size=beside.img_size or next((c.img_size for c in alike), (224, 224)),
        channels=channels,
        classes=sizes(where, "BiT", state, "head.fc.weight", 4)[0] if "head.fc.weight" in state else 0,
    )


def stages(where: str, kind: str, state: Mapping[str, Tensor], place: str) -> tuple[Ints, Ints]:
    """The widths and depths of the stages of a ResNet, which are found under a name."""
    count = count_blocks(state, rf"{re.escape(place)}\.(\d+)\.")
    widths = tuple(sizes(where, kind, state, f"{place}.{i}.blocks.0.conv3.weight", 4)[0] for i in range(count))
    depths = tuple(count_blocks(state, rf"{re.escape(place)}\.{i}\.blocks\.(\d+)\.") for i in range(count))
    return widths, depths


def groups(where: str, kind: str, widths: Ints, beside: Beside, alike: Iterable[Any]) -> int:
    """How many groups of channels are normalised, as somebody says, or models that are alike have it, or as usual."""
    told: int | None = beside.fields.get("groups") or next((config.groups for config in alike), None)
    if told is None and any(width % (4 * _USUAL_GROUPS) for width in widths):
        raise UserError(
            f"{where} is a {kind} whose number of groups its tensors do not show: the usual {_USUAL_GROUPS} do not "
            f"divide a quarter of the widths {widths}. Put a config.json beside it, or give `model`."
        )
    return told or _USUAL_GROUPS


def hf_settings(document: Mapping[str, Any]) -> dict[str, Any]:
    """The groups, which the tensors do not show."""
    check_hf(document, _HF_KIND)
    return {"groups": document.get("num_groups")}


def check_hf(document: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Refuses what the ResNet of a `config.json` may be, and ours is not; what is not said is as a BiT has it."""
    for name, value in ours.items():
        told = document.get(name, _HF_KIND[name])
        if str(told).lower() != str(value).lower():
            raise UserError(f"Its {name} is {told!r}, but vitrail's models have {value!r}.")
    stages = len(document.get("depths", (3, 4, 6, 3)))
    if document.get("output_stride", 32) < _stride(stages):
        raise UserError(f"Its output_stride is {document['output_stride']}, but vitrail's models have no dilation.")


def hf_document(config: BiTConfig) -> dict[str, Any]:
    """What `config.json` must say of the architecture."""
    return {"architectures": ["BitForImageClassification"], **hf_resnet(config, _HF_KIND)}


def hf_resnet(config: Any, kind: Mapping[str, Any]) -> dict[str, Any]:
    """What `config.json` must say of the ResNet of a BiT or a hybrid."""
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
    """What a ResNet divides the image by."""
    return 4 * 2 ** (stages - 1)
