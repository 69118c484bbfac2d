"""The windows of a feature map, shifted or not: what both Swins share.

The shift is cyclic, and a mask separates tokens that are not adjacent. A map that needs padding is padded after the
shift, as in timm: some tokens of opposite edges share the last window.

Legend: B batch, D width, (h, w) token map, W windows of n tokens each.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.models.position import Grid


class Windows:
    """The windows of maps of one size."""

    def __init__(self, grid: Grid, side: int, shifted: bool):
        self.grid, self.side = grid, side
        self.shift = [side // 2 if shifted and length > side else 0 for length in grid]
        self.padded = [-(-length // side) * side for length in grid]

    def cut(self, x: Tensor) -> Tensor:
        """Shifts and pads a map, then splits it into windows in row-major order: (B, h, w, D) → (B, W, n, D)."""
        (h, w), (full_h, full_w) = self.grid, self.padded
        if any(self.shift):
            x = torch.roll(x, (-self.shift[0], -self.shift[1]), dims=(1, 2))
        return self._split(F.pad(x, (0, 0, 0, full_w - w, 0, full_h - h)))

    def join(self, windows: Tensor) -> Tensor:
        """The inverse of `cut`."""
        (h, w), (full_h, full_w), n = self.grid, self.padded, self.side
        x = windows.reshape(-1, full_h // n, full_w // n, n, n, windows.shape[3])
        x = x.transpose(2, 3).flatten(3, 4).flatten(1, 2)[:, :h, :w]
        return torch.roll(x, (self.shift[0], self.shift[1]), dims=(1, 2)) if any(self.shift) else x

    def apart(self, device: torch.device) -> Tensor | None:
        """The pairs of tokens of each window that are not adjacent: (W, n, n); None without a shift."""
        if not any(self.shift):
            return None
        y, x = (self._regions(side, shift, device) for side, shift in zip(self.padded, self.shift, strict=True))
        region = 3 * y[:, None] + x
        parts = self._split(region[None, :, :, None])[0, :, :, 0]  # W n
        return parts[:, :, None] != parts[:, None]

    def _split(self, x: Tensor) -> Tensor:
        (full_h, full_w), n = self.padded, self.side
        x = x.reshape(-1, full_h // n, n, full_w // n, n, x.shape[3])
        return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)

    def _regions(self, side: int, shift: int, device: torch.device) -> Tensor:
        """Region indices along one side: after a shift, the last window holds two regions that are not adjacent."""
        place = torch.arange(side, device=device)
        return (place >= side - self.side).long() + (place >= side - shift).long() if shift else place * 0
