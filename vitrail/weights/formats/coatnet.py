"""CoAtNet format: timm's `MaxxVit`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from vitrail.config import Size
from vitrail.errors import UserError
from vitrail.models.coatnet import CONFIGS, CoAtNetConfig
from vitrail.weights.formats import HALF, Format, FormatSpec, from_stages, tensor_shape, to_stages
from vitrail.weights.key_tables import count_blocks
from vitrail.weights.sidecar import Sidecar


def _unsupported(config: CoAtNetConfig) -> str | None:
    """timm's stem always halves the image, and its map sizes must divide evenly."""
    if not config.shrink:
        return "a stem without downsampling"
    stride = 2 ** (len(config.widths) + 1)
    h, w = config.img_size
    return f"images of {h}x{w}, not multiples of {stride}" if h % stride or w % stride else None


FORMATS: dict[Format, FormatSpec] = {
    "timm": FormatSpec(
        r"(?:stages|layers)\.0\.blocks\.0\.(?:conv2_kxk\.weight|attn\.rel_pos\.relative_position_bias_table)",
        from_stages,
        to_stages,
        _unsupported,
        replace(HALF, crop=0.95),
    )
}


def architecture(
    where: str, state: Mapping[str, Tensor], sidecar: Sidecar, model: CoAtNetConfig | None
) -> CoAtNetConfig:
    """The configuration, from tensor shapes; these do not show whether the stem downsamples."""
    first, channels, _, _ = tensor_shape(where, "CoAtNet", state, "stem.conv1.weight", 4)
    second = tensor_shape(where, "CoAtNet", state, "stem.conv2.weight", 4)[0]
    if first != second:
        raise UserError(
            f"{where} has a stem of {first} and {second} channels: it is one of timm's coatnet_*_rw_*, which differ "
            "from the paper's coatnet_*."
        )
    stages = count_blocks(state, r"layers\.(\d+)\.blocks\.")
    widths = []
    convs = 0
    for i in range(stages):
        block = f"layers.{i}.blocks.0."
        conv = f"{block}conv3_1x1.weight" in state
        convs += conv
        last = "conv3_1x1.weight" if conv else "attn.proj.weight"
        widths.append(tensor_shape(where, "CoAtNet", state, block + last, 4)[0])
    depths = tuple(count_blocks(state, rf"layers\.{i}\.blocks\.(\d+)\.") for i in range(stages))
    seen = {"widths": tuple(widths), "depths": depths, "first": first, "convs": convs}
    listed = next((config.shrink for config in CONFIGS.values() if vars(config) | seen == vars(config)), True)
    shrink = model.shrink if model is not None else sidecar.fields.get("shrink", listed)
    candidates = sidecar.img_size, model.img_size if model is not None else None
    return CoAtNetConfig(
        widths=tuple(widths),
        depths=depths,
        first=first,
        convs=convs,
        shrink=shrink,
        img_size=_img_size(where, state, convs, stages, shrink, candidates),
        channels=channels,
        classes=tensor_shape(where, "CoAtNet", state, "head.fc.weight", 2)[0] if "head.fc.weight" in state else 0,
    )


def _img_size(
    where: str, state: Mapping[str, Tensor], convs: int, stages: int, shrink: bool, candidates: tuple[Size | None, ...]
) -> Size:
    """The image size that matches the relative position biases: a candidate that fits, else a square."""
    if convs == stages:  # without attention any size fits
        return next((size for size in candidates if size is not None), (224, 224))
    name = f"layers.{convs}.blocks.0.attn.rel_pos.relative_position_bias_table"
    rows = tensor_shape(where, "CoAtNet", state, name, 2)[0]
    stride = 2 ** (convs + 1 + shrink)
    for size in candidates:
        if size is not None and math.prod(2 * -(-side // stride) - 1 for side in size) == rows:
            return size
    side = (math.isqrt(rows) + 1) // 2
    if (2 * side - 1) ** 2 != rows:
        raise UserError(
            f"{where} has relative position biases for {rows} offsets, which fit no square image. Give `model` with "
            "its image size: vitrail.models.configure(NAME, img_size=…)."
        )
    return side * stride, side * stride
