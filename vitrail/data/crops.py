"""Random resized crops of a batch, for methods that compare several crops of one image.

Cropping and resizing is one matrix product per axis: row i of a matrix holds the weights of the source pixels in target
pixel i, with an antialiased triangle filter, as Pillow's bilinear one. So every image of a batch has its own box.

Legend: B batch, C channels, (H, W) source, (h, w) target.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vitrail.data.draws import rand

_ASPECT = (3 / 4, 4 / 3)  # of a box, relative to the image's


@dataclass(frozen=True)
class Crops:
    """Some random crops of each image, all of one size."""

    count: int
    scale: tuple[float, float]  # smallest and largest share of the image's area
    size: tuple[int, int]  # (h, w)


def random_crops(pixels: Tensor, crops: Crops, generator: torch.Generator) -> Tensor:
    """Crops of images (B, C, H, W): (count·B, C, h, w), the first crop of all images, then the second."""
    count = crops.count * len(pixels)
    area, aspect, y, x = rand(4, count, generator=generator)
    area = crops.scale[0] + area * (crops.scale[1] - crops.scale[0])
    aspect = torch.exp(math.log(_ASPECT[0]) + aspect * math.log(_ASPECT[1] / _ASPECT[0]))
    tall, wide = (area / aspect).sqrt().clamp(max=1), (area * aspect).sqrt().clamp(max=1)
    boxes = torch.stack([y * (1 - tall), x * (1 - wide), tall, wide], dim=1)
    return crop_resize(pixels.repeat(crops.count, 1, 1, 1), boxes, crops.size)


def crop_resize(pixels: Tensor, boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Cuts a box (y, x, height, width), as shares of the sides, out of each image and resizes it to `size`."""
    (h, w), (top, left, tall, wide) = pixels.shape[2:], boxes.unbind(1)
    rows = _weights(h, size[0], top * h, tall * h).to(pixels.device)
    columns = _weights(w, size[1], left * w, wide * w).to(pixels.device)
    resized = rows.unsqueeze(1) @ pixels.float() @ columns.mT.unsqueeze(1)  # B C h w
    return resized.round_().to(pixels.dtype) if pixels.dtype == torch.uint8 else resized


def _weights(source: int, target: int, start: Tensor, length: Tensor) -> Tensor:
    """The weights of source pixels in target pixels, for intervals of the source axis: (B, target, source)."""
    scale = (length / target).clamp(max=source).unsqueeze(1)  # source pixels per target pixel
    centres = start.unsqueeze(1) + (torch.arange(target) + 0.5) * scale
    distance = (torch.arange(source) + 0.5 - centres.unsqueeze(2)).abs()
    weights = (1 - distance / scale.clamp(min=1).unsqueeze(2)).clamp(min=0)
    return weights / weights.sum(dim=2, keepdim=True)
