"""Geometry of window attention: where the windows of a Swin lie in the image.

A layer computes weights per window, on a map that was shifted and then padded. Here both are undone.

Legend: B batch, H heads, N tokens of the map (h, w), W windows of n tokens each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.models.position import Grid


@dataclass(frozen=True, eq=False)
class Windows:
    """Attention within windows, which may be shifted."""

    grid: Grid
    pixels: int  # stride of a token
    heads: int
    window: int  # side in tokens
    shift: tuple[int, int]

    prefix = 0  # tokens that are not patches

    @property
    def start(self) -> Tensor:
        """Weight of each token in the head's input: uniform."""
        return torch.full((len(self._place),), 1 / len(self._place))

    @property
    def size(self) -> int:
        """Number of weights per image."""
        return self.heads * self._tokens.numel() * self.window**2

    @property
    def even(self) -> float:
        """The attention distance of uniform attention within each window, in pixels."""
        down, across = (self._parts(side, by) for side, by in zip(self.grid, self.shift, strict=True))
        parts = self._cut(down[:, None] * (int(across.max()) + 1) + across)  # W n
        together = parts[:, :, None] == parts[:, None]
        return self.distance(together[None, :, None].float()).item()

    def follow(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Attention of each head from a weighted mean of tokens, `rows` (B or 1, N): (B, H, N)."""
        counts = F.pad(rows, (0, 1)).to(weights)[:, self._tokens]  # B W n; padding has weight 0
        reached = counts[:, :, None, None] @ weights  # B W H 1 n
        return self._join(reached[:, :, :, 0])

    def distance(self, weights: Tensor) -> Tensor:
        """Mean attention distance of each head in pixels, without attention to padding: (B, H)."""
        between = weights * (self._tokens >= 0).to(weights)[:, None, None]
        far = (between * self._apart.to(weights)).sum(dim=-1) / between.sum(dim=-1)
        return self._join(far).mean(dim=-1)

    def middles(self) -> Tensor:
        """The central token of every window, or of every part of a window cut by the border."""
        y, x = (torch.tensor([(begin + end) // 2 for begin, end in pairwise(edges)]) for edges in self.edges())
        return (y[:, None] * self.grid[1] + x).flatten()

    def edges(self) -> tuple[list[int], list[int]]:
        """The rows and columns where windows or their parts begin, and the end of the map."""
        parts = (self._parts(side, by)[:side].roll(by) for side, by in zip(self.grid, self.shift, strict=True))
        down, across = ([0, *(1 + part.diff().nonzero().flatten()).tolist(), len(part)] for part in parts)
        return down, across

    def _parts(self, side: int, by: int) -> Tensor:
        """Labels along a shifted and padded side, equal where tokens of a window attend to each other.

        The layer masks attention between the parts that the shift joins in the last window.
        """
        place = torch.arange(-(-side // self.window) * self.window)
        return 2 * (place // self.window) + (place >= len(place) - by)

    def _join(self, windows: Tensor) -> Tensor:
        """Values by window, (B, W, H, n), rearranged to the order of tokens: (B, H, N)."""
        return windows.transpose(1, 2).flatten(2)[:, :, self._place]

    @cached_property
    def _tokens(self) -> Tensor:
        """Index of the token at each position of each window, row by row, or -1 for padding: (W, n)."""
        (h, w), n = self.grid, self.window
        numbers = torch.arange(h * w).reshape(h, w).roll((-self.shift[0], -self.shift[1]), dims=(0, 1))
        return self._cut(F.pad(numbers, (0, -w % n, 0, -h % n), value=-1))

    def _cut(self, whole: Tensor) -> Tensor:
        """Partitions a padded map into windows, row by row: (W, n)."""
        n = self.window
        return whole.reshape(len(whole) // n, n, -1, n).transpose(1, 2).reshape(-1, n * n)

    @cached_property
    def _place(self) -> Tensor:
        """Position of each token in the flattened windows: (N,)."""
        return self._tokens.flatten().argsort()[-self.grid[0] * self.grid[1] :]

    @cached_property
    def _apart(self) -> Tensor:
        """Distances in pixels between the tokens of each window, equal for all heads: (W, 1, n, n)."""
        y, x = (self._tokens // self.grid[1]) * float(self.pixels), (self._tokens % self.grid[1]) * float(self.pixels)
        return torch.hypot(y[:, :, None] - y[:, None], x[:, :, None] - x[:, None])[:, None]
