"""Resizing and cropping inside an exported graph, for images of any size, equal to `Preprocess.pixels`.

Runtimes disagree on antialiased resizing: ONNX Runtime has two of the three filters, OpenVINO ignores `antialias`. Here
it is two matrix products with weights that the graph computes from the image's size. Every runtime computes those the
same way. The filters are Pillow's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from vitrail.config import Size
from vitrail.data.pixels import WHITE
from vitrail.data.preprocess import Preprocess, Resizing

Number = TypeVar("Number", int, float)


class Frame(nn.Module):
    """Images (B, H, W, C) of any size as pixels (B, C, h, w) of the model's size, float32."""

    def __init__(self, preprocess: Preprocess):
        super().__init__()
        self.preprocess = preprocess

    def forward(self, images: Tensor) -> Tensor:
        h, w = self.preprocess.img_size
        height, width = images.shape[1:3]
        if self.preprocess.fit == "pad":
            return self._padded(images.permute(0, 3, 1, 2).float())
        # The ends of a very long image are cut off first, as in `Preprocess`.
        y = _larger(height - _larger(8 * h * width // w, 1), 0) // 2
        x = _larger(width - _larger(8 * w * height // h, 1), 0) // 2
        pixels = images[:, y : height - y, x : width - x].permute(0, 3, 1, 2).float()  # B C H W
        height, width = height - 2 * y, width - 2 * x
        # The smallest size of the same aspect ratio that covers the model's.
        rows, columns = (int(side / self.preprocess.crop) for side in (h, w))
        # An empty image must not divide by zero, which ends the process.
        down, across = _larger(height, 1), _larger(width, 1)
        covered = _larger(rows, columns * height // across), _larger(columns, rows * width // down)
        pixels = self._whole(pixels @ self._weights(width, covered[1], w).T)
        pixels = self._whole(self._weights(height, covered[0], h) @ pixels)
        return pixels.clamp(0, WHITE[16]) if self.preprocess.bits == 16 else pixels  # bicubic overshoots

    def _padded(self, pixels: Tensor) -> Tensor:
        """The whole image, as large as fits, at the top left, as in `tasks.placement.fitted`."""
        (h, w), (height, width) = self.preprocess.img_size, pixels.shape[2:]
        rows, columns = shown(height, width, self.preprocess.img_size)
        pixels = self._whole(pixels @ (self._weights(width, columns, w, 0) * (torch.arange(w) < columns)[:, None]).T)
        pixels = self._whole((self._weights(height, rows, h, 0) * (torch.arange(h) < rows)[:, None]) @ pixels)
        return pixels.clamp(0, WHITE[16]) if self.preprocess.bits == 16 else pixels  # bicubic overshoots

    def _weights(self, size: int, covered: int, kept: int, start: int | None = None) -> Tensor:
        """The share of each of `size` pixels in each of the `kept` ones after resizing to `covered`.

        The kept ones are the centre, or those from `start`.
        """
        rest = covered - kept
        start = rest // 2 + rest % 4 // 3 if start is None else start  # rest / 2, rounded half to even
        scale = size / covered
        centres = (torch.arange(kept) + start + 0.5) * scale
        weights = FILTERS[self.preprocess.interpolation](
            (torch.arange(size) + 0.5 - centres[:, None]) / _larger(scale, 1.0)
        )
        total = weights.sum(dim=1, keepdim=True)
        return weights / torch.where(total == 0, torch.ones_like(total), total)  # 0 beyond the image, in the padding

    def _whole(self, pixels: Tensor) -> Tensor:
        """8-bit pixels rounded and clipped, as in training after each of the two passes; others are kept."""
        return (pixels + 0.5).floor().clamp(0, WHITE[8]) if self.preprocess.bits == 8 else pixels


def _larger(a: Number, b: Number) -> Number:
    larger: Number = torch.sym_max(a, b)  # type: ignore[no-untyped-call]  # `max` would fix it in the graph
    return larger


def shown(height: int, width: int, input: Size) -> tuple[int, int]:
    """The rows and columns of the input that a padded image takes."""
    h, w = input
    down, across = _larger(height, 1), _larger(width, 1)
    return _smaller(h, _larger(height * w // across, 1)), _smaller(w, _larger(width * h // down, 1))


def _smaller(a: Number, b: Number) -> Number:
    smaller: Number = torch.sym_min(a, b)  # type: ignore[no-untyped-call]
    return smaller


def _bilinear(x: Tensor) -> Tensor:
    return (1 - x.abs()).clamp(min=0)


def _bicubic(x: Tensor) -> Tensor:
    x = x.abs()
    outer = torch.where(x < 2, ((-0.5 * x + 2.5) * x - 4) * x + 2, torch.zeros_like(x))
    return torch.where(x < 1, (1.5 * x - 2.5) * x * x + 1, outer)


def _lanczos(x: Tensor) -> Tensor:
    return torch.where(x.abs() < 3, torch.sinc(x) * torch.sinc(x / 3), torch.zeros_like(x))


FILTERS: dict[Resizing, Callable[[Tensor], Tensor]] = {
    "bilinear": _bilinear,
    "bicubic": _bicubic,
    "lanczos": _lanczos,
}
