"""Dense, anchor-free box heads: every position of a feature map predicts a box and a score for each class.

As in FCOS (https://arxiv.org/abs/1904.01355), two towers of 3×3 convolutions with GroupNorm; one predicts the class
logits, the other the distances from the position to the four sides of the box, in strides. There is no centre-ness: the
class scores themselves learn how well the box fits (see `tasks/dense_loss.py`).

`fcos` reads one map of stride 8 or less, to which the last map of the backbone is upsampled: it learns from few images.
`pyramid` reads maps of several strides, each for objects of its size: those of a pyramid backbone, merged top-down, or
the simple feature pyramid of ViTDet (https://arxiv.org/abs/2203.16527), made from the last map of a plain one.

Legend: B batch, D width, C channels of the towers, K classes, Q positions of all levels, (h, w) a feature map.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.models.heads.head import Head, level_widths
from vitrail.models.model import ModelConfig
from vitrail.models.position import Grid

FINEST = 8  # pixels: the stride to which `fcos` upsamples
CHANNELS = 256  # of the towers, at most
LARGEST = 8  # strides: a level of a pyramid is for objects of half this size to this size
GROUPS = 32  # of GroupNorm, at most
FARTHEST = 6.0  # largest exponent: a side is at most e⁶ ≈ 400 strides away


class BoxHead(Head):
    """Base class of heads for boxes: outputs are (B, Q, 4 + K), corners in pixels of the input and class logits.

    The scores of a set of predictions, whose `points` are None, have one more logit, for "no object".
    """

    local = True

    def __init__(self, body: ModelConfig, classes: int):
        super().__init__(body, classes)
        self.classes = classes

    def points(self, size: Grid) -> Tensor | None:  # noqa: ARG002
        """What makes each prediction: (Q, 5), its x, y and stride, and the smallest and largest side of its objects."""
        return None

    def evidence(self, outputs: Tensor) -> Tensor:
        """The logit of the strongest box of each class; of a set, the logarithm of its probability."""
        return self._confidence(outputs).amax(dim=1)

    def answering(self, outputs: Tensor, classes: Tensor) -> Tensor:
        """The strongest box of the class alone."""
        own = self._confidence(outputs)[torch.arange(len(classes)), :, classes]
        return F.one_hot(own.argmax(dim=1), own.shape[1]).to(own)

    def _confidence(self, outputs: Tensor) -> Tensor:
        logits = outputs[..., 4:]
        return logits if logits.shape[-1] == self.classes else logits.log_softmax(dim=-1)[..., : self.classes]


def norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(math.gcd(GROUPS, channels), channels)


class Tower(nn.Sequential):
    """3×3 convolutions, each followed by GroupNorm and ReLU."""

    def __init__(self, channels: int, convs: int):
        layers: list[nn.Module] = []
        for _ in range(convs):
            layers += [nn.Conv2d(channels, channels, 3, padding=1), norm(channels), nn.ReLU()]
        super().__init__(*layers)


class Towers(nn.Module):
    """The predictions at every position of feature maps: (B, Q, 4 + K)."""

    def __init__(self, channels: int, classes: int, convs: int, strides: Sequence[int]):
        super().__init__()
        self.strides = list(strides)
        self.cls_tower = Tower(channels, convs)
        self.box_tower = Tower(channels, convs)
        self.cls = nn.Conv2d(channels, classes, 3, padding=1)
        self.box = nn.Conv2d(channels, 4, 3, padding=1)
        if not self.cls.weight.is_meta:
            for layer in (self.cls, self.box):
                nn.init.normal_(layer.weight, std=0.01)
            nn.init.constant_(self.cls.bias, -math.log(99))  # type: ignore[arg-type]  # a score of 0.01
            nn.init.constant_(self.box.bias, math.log(LARGEST / 4))  # type: ignore[arg-type]

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        return torch.cat([self._level(x, stride) for x, stride in zip(maps, self.strides, strict=True)], dim=1)

    def _level(self, x: Tensor, stride: int) -> Tensor:
        logits = self.cls(self.cls_tower(x)).float()
        sides = self.box(self.box_tower(x)).float()  # pixels need more digits than bf16 has
        sides = sides.clamp(max=FARTHEST).exp() * stride
        centre = torch.stack(_centres(x.shape[-2], x.shape[-1], stride, x.device))
        boxes = torch.cat([centre - sides[:, :2], centre + sides[:, 2:]], dim=1)
        return torch.cat([boxes, logits], dim=1).flatten(2).transpose(1, 2)  # B hw 4+K

    def points(self, size: Grid, ranges: Sequence[tuple[float, float]]) -> Tensor:
        found = []
        for stride, (least, most) in zip(self.strides, ranges, strict=True):
            x, y = _centres(-(-size[0] // stride), -(-size[1] // stride), stride, self.cls.weight.device)
            rest = [torch.full_like(x, value) for value in (stride, least, most)]
            found.append(torch.stack([x, y, *rest], dim=-1).flatten(0, 1))
        return torch.cat(found)


class Fcos(BoxHead):
    title = "convolutions on one map of stride 8"

    def __init__(self, body: ModelConfig, classes: int):
        super().__init__(body, classes)
        self.coarse = stride = body.stride
        width = body.width
        channels = min(width, CHANNELS) // 2 if stride > FINEST else min(width, CHANNELS)
        layers: list[nn.Module] = []
        while stride > FINEST and stride % 2 == 0:
            layers += [nn.ConvTranspose2d(width, channels, 2, 2), norm(channels), nn.GELU()]
            stride, width = stride // 2, channels
        self.neck = nn.Sequential(*(layers or [nn.Conv2d(width, channels, 1)]))
        self.towers = Towers(channels, classes, 2, [stride])

    def forward(self, read: Tensor) -> Tensor:
        outputs: Tensor = self.towers([self.neck(read)])
        return outputs

    def points(self, size: Grid) -> Tensor:
        # A backbone that pads images has a last map of whole strides, which may end outside the image.
        h, w = (-(-side // self.coarse) * self.coarse for side in size)
        return self.towers.points((h, w), [(0.0, math.inf)])


class SimplePyramid(nn.Module):
    """ViTDet's simple feature pyramid: maps of 4, 2, 1 and ½ times the resolution of the last map."""

    def __init__(self, width: int, channels: int):
        super().__init__()
        half, quarter = width // 2, width // 4
        fine = [
            nn.ConvTranspose2d(width, half, 2, 2),
            ChannelNorm(half),
            nn.GELU(),
            nn.ConvTranspose2d(half, quarter, 2, 2),
        ]
        scales = [
            nn.Sequential(*fine),
            nn.ConvTranspose2d(width, half, 2, 2),
            nn.Identity(),
            nn.MaxPool2d(2, ceil_mode=True),
        ]
        self.stages = nn.ModuleList(
            nn.Sequential(
                scale,
                nn.Conv2d(inner, channels, 1, bias=False),
                ChannelNorm(channels),
                nn.Conv2d(channels, channels, 3, padding=1, bias=False),
                ChannelNorm(channels),
            )
            for scale, inner in zip(scales, (quarter, half, width, width), strict=True)
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        return [stage(x) for stage in self.stages]


class TopDown(nn.Module):
    """A feature pyramid network (https://arxiv.org/abs/1612.03144): coarse maps are added to the finer ones."""

    def __init__(self, widths: Sequence[int], channels: int):
        super().__init__()
        self.lateral = nn.ModuleList(nn.Conv2d(width, channels, 1) for width in widths)
        self.smooth = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in widths)

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        maps = [layer(x) for layer, x in zip(self.lateral, maps, strict=True)]
        for i in range(len(maps) - 1, 0, -1):
            maps[i - 1] = maps[i - 1] + F.interpolate(maps[i], size=maps[i - 1].shape[-2:], mode="nearest")
        return [layer(x) for layer, x in zip(self.smooth, maps, strict=True)]


class Pyramid(BoxHead):
    title = "convolutions on maps of several strides"
    levels = True
    pyramid = True

    def __init__(self, body: ModelConfig, classes: int):
        super().__init__(body, classes)
        channels = min(body.width, CHANNELS)
        self.plain = len(body.grids) == 1
        if self.plain:
            self.neck: nn.Module = SimplePyramid(body.width, channels)
            strides = [body.stride // 4, body.stride // 2, body.stride, body.stride * 2]
        else:
            strides = [body.stride // 2**i for i in reversed(range(len(body.grids)))]  # every stage halves its map
            self.neck = TopDown(level_widths(body), channels)
        self.towers = Towers(channels, classes, 4, strides)

    @classmethod
    def misfit(cls, body: ModelConfig) -> str:
        if len(body.grids) == 1 and body.stride % 4:
            return (
                f"needs a stride that is a multiple of 4, but that of the backbone is {body.stride}. Use --head fcos."
            )
        return ""

    def forward(self, read: Any) -> Tensor:
        outputs: Tensor = self.towers(self.neck(read[-1] if self.plain else read))
        return outputs

    def points(self, size: Grid) -> Tensor:
        """Every level is for objects of 4 to 8 of its strides; the first also for smaller, the last for larger ones."""
        *most, _ = (float(LARGEST * stride) for stride in self.towers.strides)
        return self.towers.points(size, list(zip([0.0, *most], [*most, math.inf], strict=True)))


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of a feature map, (B, C, h, w)."""

    def __init__(self, channels: int):
        super().__init__(channels, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def _centres(h: int, w: int, stride: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """x and y of the centres of a map's positions, (h, w) each, in pixels of the image."""
    y, x = ((torch.arange(count, device=device, dtype=torch.float32) + 0.5) * stride for count in (h, w))
    return x.expand(h, w), y[:, None].expand(h, w)
