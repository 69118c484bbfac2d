"""The heads of SETR: naive upsampling, progressive upsampling and multi-level aggregation.

https://arxiv.org/abs/2012.15840, with the layers, tensor names and auxiliary heads of mmsegmentation. As in the
trained configurations, auxiliary heads have two convolutions, and heads read these blocks of 24, counted from 1: 10,
15, 20 and the last; multi-level aggregation 6, 12, 18 and the last. Other depths have blocks at the same shares.

Legend: B batch, D width, K classes, (h, w) feature map.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.models.heads.head import Head, level_widths
from vitrail.models.model import ModelConfig
from vitrail.models.norm import BatchNorm2d

CHANNELS = 256
MLA_CHANNELS = 128


class ConvModule(nn.Module):
    """A convolution without bias, BatchNorm and ReLU."""

    def __init__(self, channels: int, out: int, kernel: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, out, kernel, padding=kernel // 2, bias=False)
        self.bn = BatchNorm2d(out)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)))


class Upsample(nn.Module):
    """`convs` times a convolution and upsampling by `scale`, after a LayerNorm, and the class layer."""

    def __init__(self, width: int, classes: int, convs: int, scale: int, kernel: int):
        super().__init__()
        self.scale = scale
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.up_convs = nn.ModuleList(
            nn.Sequential(ConvModule(CHANNELS if i else width, CHANNELS, kernel)) for i in range(convs)
        )
        self.conv_seg = nn.Conv2d(CHANNELS, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        for conv in self.up_convs:
            x = F.interpolate(conv(x), scale_factor=self.scale, mode="bilinear", align_corners=False)
        logits: Tensor = self.conv_seg(x)
        return logits


def _needs_levels(body: ModelConfig) -> str:
    if len(body.grids) > 1:
        return f"needs the blocks of a plain encoder, not the {len(body.grids)} stages of a pyramid. Use --head mlp."
    return ""


class _Progressive(Head):
    """`Upsample` on the last map, and as auxiliary heads on the earlier ones."""

    levels = (Fraction(10, 24), Fraction(15, 24), Fraction(20, 24))
    convs: int
    scale: int
    kernel: int

    def __init__(self, body: ModelConfig, classes: int):
        super().__init__(body, classes)
        self.decode_head = Upsample(body.width, classes, self.convs, self.scale, self.kernel)
        self.auxiliary_head = nn.ModuleList(
            Upsample(body.width, classes, 2, 4, self.kernel) for _ in level_widths(body, self.levels)[:-1]
        )
        if not self.decode_head.conv_seg.weight.is_meta:
            initialise(self)

    @classmethod
    def misfit(cls, body: ModelConfig) -> str:
        return _needs_levels(body)

    def forward(self, read: Sequence[Tensor]) -> Tensor:
        logits: Tensor = self.decode_head(read[-1])
        return logits  # B K 4h 4w, or 16h 16w

    def auxiliary(self, read: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(head(level) for head, level in zip(self.auxiliary_head, read[:-1], strict=True))


class SetrNaive(_Progressive):
    title = "SETR's naive upsampling"
    convs, scale, kernel = 1, 4, 1


class SetrPup(_Progressive):
    title = "SETR's progressive upsampling"
    convs, scale, kernel = 4, 2, 3


class SetrMla(Head):
    """Multi-level aggregation: deeper levels are added to each level, which is refined, upsampled and concatenated."""

    title = "SETR's multi-level aggregation"
    levels = True

    def __init__(self, body: ModelConfig, classes: int):
        super().__init__(body, classes)
        count = len(level_widths(body))
        self.neck = MlaNeck(body.width, count)
        self.decode_head = MlaHead(classes, count)
        self.auxiliary_head = nn.ModuleList(ClassLayer(classes) for _ in range(count))
        if not self.decode_head.conv_seg.weight.is_meta:
            initialise(self)

    @classmethod
    def misfit(cls, body: ModelConfig) -> str:
        return _needs_levels(body)

    def forward(self, read: Sequence[Tensor]) -> Tensor:
        logits: Tensor = self.decode_head(self.neck(read))
        return logits  # B K 4h 4w

    def auxiliary(self, read: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(layer(level) for layer, level in zip(self.auxiliary_head, self.neck(read), strict=True))


class ClassLayer(nn.Module):
    """The class layer alone."""

    def __init__(self, classes: int):
        super().__init__()
        self.conv_seg = nn.Conv2d(CHANNELS, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.conv_seg(x)
        return logits


class MlaNeck(nn.Module):
    """A LayerNorm for each level, and the aggregation."""

    def __init__(self, width: int, count: int):
        super().__init__()
        self.norm = nn.ModuleList(nn.LayerNorm(width, eps=1e-6) for _ in range(count))
        self.mla = Aggregation(width, count)

    def forward(self, levels: Sequence[Tensor]) -> list[Tensor]:
        normed = [
            norm(level.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) for norm, level in zip(self.norm, levels, strict=True)
        ]
        found: list[Tensor] = self.mla(normed)
        return found


class Aggregation(nn.Module):
    """Two convolutions for each level, the deeper levels added in between; the deepest comes first."""

    def __init__(self, width: int, count: int):
        super().__init__()
        self.channel_proj = nn.ModuleList(ConvModule(width, CHANNELS, 1) for _ in range(count))
        self.feat_extract = nn.ModuleList(ConvModule(CHANNELS, CHANNELS, 3) for _ in range(count))

    def forward(self, levels: Sequence[Tensor]) -> list[Tensor]:
        own = [project(level) for project, level in zip(self.channel_proj, levels, strict=True)]
        sums = [own[-1]]
        for level in own[-2::-1]:
            sums.append(sums[-1] + level)
        return [conv(level) for conv, level in zip(self.feat_extract, sums, strict=True)]


class MlaHead(nn.Module):
    """Two convolutions and upsampling by 4 for each level, concatenated, and the class layer."""

    def __init__(self, classes: int, count: int):
        super().__init__()
        self.up_convs = nn.ModuleList(
            nn.Sequential(ConvModule(CHANNELS, MLA_CHANNELS, 3), ConvModule(MLA_CHANNELS, MLA_CHANNELS, 3))
            for _ in range(count)
        )
        self.conv_seg = nn.Conv2d(MLA_CHANNELS * count, classes, 1)

    def forward(self, levels: Sequence[Tensor]) -> Tensor:
        up = [
            F.interpolate(convs(level), scale_factor=4, mode="bilinear", align_corners=False)
            for convs, level in zip(self.up_convs, levels, strict=True)
        ]
        logits: Tensor = self.conv_seg(torch.cat(up, dim=1))
        return logits


def initialise(head: nn.Module) -> None:
    """Kaiming for convolutions before a ReLU, a small normal distribution for the class layers."""
    for name, module in head.named_modules():
        if isinstance(module, nn.Conv2d):
            if module.bias is None:
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            else:
                nn.init.normal_(module.weight, std=0.01)
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.BatchNorm2d) and name:
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
