"""CoAtNets in timm's `MaxxVit`, whose stages are our layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from vitrail.config import Size
from vitrail.errors import UserError
from vitrail.models.coatnet import CONFIGS, CoAtNetConfig
from vitrail.weights.formats import HALF, Format, Layout, from_stages, sizes, to_stages
from vitrail.weights.key_tables import count_blocks
from vitrail.weights.sidecar import Beside


def _cannot(config: CoAtNetConfig) -> str | None:
    """timm's stem always halves the image, and it counts every halving of a map in whole places."""
    if not config.shrink:
        return "a stem that does not shrink the image"
    stride = 2 ** (len(config.widths) + 1)
    h, w = config.img_size
    return f"images of {h}x{w}, which are no multiples of {stride}," if h % stride or w % stride else None


LAYOUTS: dict[Format, Layout] = {
    "timm": Layout(
        r"(?:stages|layers)\.0\.blocks\.0\.(?:conv2_kxk\.weight|attn\.rel_pos\.relative_position_bias_table)",
        from_stages,
        to_stages,
        _cannot,
        replace(HALF, crop=0.95),
    )
}


def architecture(where: str, state: Mapping[str, Tensor], beside: Beside, model: CoAtNetConfig | None) -> CoAtNetConfig:
    """The architecture that tensors have, by their shapes: all but whether the stem shrinks the image."""
    first, channels, _, _ = sizes(where, "CoAtNet", state, "stem.conv1.weight", 4)
    second = sizes(where, "CoAtNet", state, "stem.conv2.weight", 4)[0]
    if first != second:
        raise UserError(
            f"{where} has a stem of {first} and {second} channels: it is one of timm's coatnet_*_rw_*, which are other "
            "networks than the paper's coatnet_*."
        )
    stages = count_blocks(state, r"layers\.(\d+)\.blocks\.")
    widths = []
    convs = 0
    for i in range(stages):
        block = f"layers.{i}.blocks.0."
        conv = f"{block}conv3_1x1.weight" in state
        convs += conv
        last = "conv3_1x1.weight" if conv else "attn.proj.weight"
        widths.append(sizes(where, "CoAtNet", state, block + last, 4)[0])
    depths = tuple(count_blocks(state, rf"layers\.{i}\.blocks\.(\d+)\.") for i in range(stages))
    seen = {"widths": tuple(widths), "depths": depths, "first": first, "convs": convs}
    listed = next((config.shrink for config in CONFIGS.values() if vars(config) | seen == vars(config)), True)
    shrink = model.shrink if model is not None else beside.fields.get("shrink", listed)
    said = beside.img_size, model.img_size if model is not None else None
    return CoAtNetConfig(
        widths=tuple(widths),
        depths=depths,
        first=first,
        convs=convs,
        shrink=shrink,
        img_size=_img_size(where, state, convs, stages, shrink, said),
        channels=channels,
        classes=sizes(where, "CoAtNet", state, "head.fc.weight", 2)[0] if "head.fc.weight" in state else 0,
    )


def _img_size(
    where: str, state: Mapping[str, Tensor], convs: int, stages: int, shrink: bool, said: tuple[Size | None, ...]
) -> Size:
    """The image size that the offsets of the first map with attention are for: as somebody says, else of a square."""
    if convs == stages:  # without attention any size fits
        return next((size for size in said if size is not None), (224, 224))
    name = f"layers.{convs}.blocks.0.attn.rel_pos.relative_position_bias_table"
    rows = sizes(where, "CoAtNet", state, name, 2)[0]
    stride = 2 ** (convs + 1 + shrink)
    for size in said:
        if size is not None and math.prod(2 * -(-side // stride) - 1 for side in size) == rows:
            return size
    side = (math.isqrt(rows) + 1) // 2
    if (2 * side - 1) ** 2 != rows:
        raise UserError(
            f"{where} has biases for {rows} offsets, which are those of no square map. Give the model with its image "
            "size: `model` may be a configuration, vitrail.models.configure(NAME, img_size=…)."
        )
    return side * stride, side * stride
