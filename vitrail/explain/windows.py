"""Where the windows of a Swin lie in the picture, and what is seen in them.

A layer gives weights window by window, of a map that was shifted and then padded: here both are undone.

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
    """Tokens that attend within windows, which may be shifted."""

    grid: Grid
    pixels: int  # from one token to the next
    heads: int
    window: int  # tokens of a side
    shift: tuple[int, int]

    prefix = 0  # tokens that are no patch

    @property
    def start(self) -> Tensor:
        """How much each token counts: they are averaged."""
        return torch.full((len(self._place),), 1 / len(self._place))

    @property
    def size(self) -> int:
        """Numbers in the weights of one image."""
        return self.heads * self._tokens.numel() * self.window**2

    @property
    def even(self) -> float:
        """The attention distance, in pixels, of a head that looks at all of each window alike."""
        down, across = (self._parts(side, by) for side, by in zip(self.grid, self.shift, strict=True))
        parts = self._cut(down[:, None] * (int(across.max()) + 1) + across)  # W n
        together = parts[:, :, None] == parts[:, None]
        return self.distance(together[None, :, None].float()).item()

    def follow(self, rows: Tensor, weights: Tensor) -> Tensor:
        """What is reached from tokens that count as `rows` say, (B or 1, N), in each head: (B, H, N)."""
        counts = F.pad(rows, (0, 1)).to(weights)[:, self._tokens]  # B W n; the padding counts nothing
        reached = counts[:, :, None, None] @ weights  # B W H 1 n
        return self._join(reached[:, :, :, 0])

    def distance(self, weights: Tensor) -> Tensor:
        """How far tokens look on average, in pixels: (B, H). What goes to the padding does not count."""
        between = weights * (self._tokens >= 0).to(weights)[:, None, None]
        far = (between * self._apart.to(weights)).sum(dim=-1) / between.sum(dim=-1)
        return self._join(far).mean(dim=-1)

    def middles(self) -> Tensor:
        """The token in the middle of every window, or of every part of one that the edge of the picture cuts."""
        y, x = (torch.tensor([(begin + end) // 2 for begin, end in pairwise(edges)]) for edges in self.edges())
        return (y[:, None] * self.grid[1] + x).flatten()

    def edges(self) -> tuple[list[int], list[int]]:
        """The rows and the columns of the map at which windows or their parts begin, and its ends."""
        parts = (self._parts(side, by)[:side].roll(by) for side, by in zip(self.grid, self.shift, strict=True))
        down, across = ([0, *(1 + part.diff().nonzero().flatten()).tolist(), len(part)] for part in parts)
        return down, across

    def _parts(self, side: int, by: int) -> Tensor:
        """Along a side that was shifted and padded, numbers that are equal where tokens of a window may see each other.

        The layer keeps apart what the shift brings into the last window; padding moves that away from the edges.
        """
        place = torch.arange(-(-side // self.window) * self.window)
        return 2 * (place // self.window) + (place >= len(place) - by)

    def _join(self, windows: Tensor) -> Tensor:
        """Values of the tokens of windows, (B, W, H, n), where they are in the picture: (B, H, N)."""
        return windows.transpose(1, 2).flatten(2)[:, :, self._place]

    @cached_property
    def _tokens(self) -> Tensor:
        """Which token, counted row by row, is at each place of each window, or -1 where it is padding: (W, n)."""
        (h, w), n = self.grid, self.window
        numbers = torch.arange(h * w).reshape(h, w).roll((-self.shift[0], -self.shift[1]), dims=(0, 1))
        return self._cut(F.pad(numbers, (0, -w % n, 0, -h % n), value=-1))

    def _cut(self, whole: Tensor) -> Tensor:
        """A padded map in windows, row by row: (W, n)."""
        n = self.window
        return whole.reshape(len(whole) // n, n, -1, n).transpose(1, 2).reshape(-1, n * n)

    @cached_property
    def _place(self) -> Tensor:
        """The place of each token among those of all windows: (N,)."""
        return self._tokens.flatten().argsort()[-self.grid[0] * self.grid[1] :]

    @cached_property
    def _apart(self) -> Tensor:
        """Pixels between the tokens of each window, for all heads alike: (W, 1, n, n)."""
        y, x = (self._tokens // self.grid[1]) * float(self.pixels), (self._tokens % self.grid[1]) * float(self.pixels)
        return torch.hypot(y[:, :, None] - y[:, None], x[:, :, None] - x[:, None])[:, None]
