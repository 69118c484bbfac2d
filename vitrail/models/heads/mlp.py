"""SegFormer's MLP head: one linear layer on every level, upsampled, concatenated and mixed.

https://arxiv.org/abs/2105.15203, with the layers and the order of transformers: deepest level first. Tensor names are
those of its files.

Legend: B batch, K classes, (h, w) finest feature map.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.models.heads.head import Head, level_widths
from vitrail.models.layers import Dropout
from vitrail.models.model import ModelConfig
from vitrail.models.norm import BatchNorm2d

CHANNELS = 256  # as of SegFormer's B0 and B1; the larger ones have 768
_DROP = 0.1


class _Projection(nn.Module):
    """A linear layer on each position of a map."""

    def __init__(self, channels: int, out: int):
        super().__init__()
        self.proj = nn.Linear(channels, out)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.proj(x.permute(0, 2, 3, 1))
        return projected.permute(0, 3, 1, 2)  # B C h w


class Mlp(Head):
    title = "SegFormer's MLP head"
    levels = True
    pyramid = True

    def __init__(self, body: ModelConfig, classes: int):
        super().__init__(body, classes)
        widths, channels = level_widths(body), CHANNELS
        self.linear_c = nn.ModuleList(_Projection(width, channels) for width in widths)
        self.linear_fuse = nn.Conv2d(len(widths) * channels, channels, 1, bias=False)
        self.batch_norm = BatchNorm2d(channels)
        self.dropout = Dropout(_DROP)
        self.classifier = nn.Conv2d(channels, classes, 1)
        if not self.classifier.weight.is_meta:
            for module in self.modules():
                if isinstance(module, nn.Linear | nn.Conv2d):
                    nn.init.trunc_normal_(module.weight, std=0.02)
                    if module.bias is not None:
                        nn.init.zeros_(module.bias)

    def forward(self, read: Sequence[Tensor]) -> Tensor:
        h, w = read[0].shape[2:]
        maps = [
            F.interpolate(project(level), (h, w), mode="bilinear", align_corners=False)
            for project, level in zip(self.linear_c, read, strict=True)
        ]
        x = F.relu(self.batch_norm(self.linear_fuse(torch.cat(maps[::-1], dim=1))))
        logits: Tensor = self.classifier(self.dropout(x))
        return logits  # B K h w
