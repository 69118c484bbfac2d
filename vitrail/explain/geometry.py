"""Where in the picture the tokens and keys of each layer that attends lie, in every family that has such layers.

    ViT, hybrid, CoAtNet    every token attends to all tokens                             `Tokens`
    PVT, PVT v2             every token attends to keys, each made of an area of tokens   `Tokens` with `areas`
    Swin                    every token attends to those of its window                    `Windows`

A layout reads the weights that its layer gives, (B, H, N, M) or of windows (B, W, H, n, n), and answers two questions:
what is reached from given tokens, and how far that is.

Legend: B batch, H heads, N tokens, M keys, (h, w) the grid of patches of a stage, W windows of n tokens each. Tokens
that are no patch (class, registers) come first.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeGuard, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.errors import UserError
from vitrail.explain.windows import Windows
from vitrail.models.coatnet import CoAtNet, RelativeAttention
from vitrail.models.hybrid import Hybrid
from vitrail.models.layers import Attention
from vitrail.models.position import Grid
from vitrail.models.pvt import PVT, ReducedAttention
from vitrail.models.pvt_v2 import PVTv2
from vitrail.models.swin import Swin, WindowAttention
from vitrail.models.vit import ViT

Attentive = ViT | Hybrid | Swin | PVT | PVTv2 | CoAtNet
AnyAttention = Attention | WindowAttention | ReducedAttention | RelativeAttention
AnyModule = TypeVar("AnyModule", bound=nn.Module)


@dataclass(frozen=True, eq=False)
class Tokens:
    """Tokens that all attend to the whole picture."""

    grid: Grid
    pixels: int  # from one patch to the next
    heads: int
    start: Tensor  # N: how much each token counts for what the head reads, or in an earlier stage every patch alike
    areas: Tensor | None = None  # M h·w: of which patches each key is made, in shares; None if the tokens are the keys

    @property
    def prefix(self) -> int:
        """Tokens that are no patch."""
        return len(self.start) - self.grid[0] * self.grid[1]

    @property
    def size(self) -> int:
        """Numbers in the weights of one image."""
        return self.heads * len(self.start) * (len(self.start) if self.areas is None else len(self.areas))

    @property
    def even(self) -> float:
        """The attention distance, in pixels, of a head that looks at all keys alike."""
        return self._apart.mean().item()

    def follow(self, rows: Tensor, weights: Tensor) -> Tensor:
        """What is reached from tokens that count as `rows` say, (B or 1, N), in each head: (B, H, N)."""
        reached = (rows[:, None, None].to(weights) @ weights)[:, :, 0]  # B H M
        return reached if self.areas is None else reached @ self.areas.to(weights)

    def distance(self, weights: Tensor) -> Tensor:
        """How far patches look on average, in pixels, by the centres of what they look at: (B, H)."""
        between = weights[:, :, self.prefix :, self.prefix :]
        far = torch.einsum("bhqk,qk->bhq", between, self._apart.to(between.device)) / between.sum(dim=-1)
        return far.mean(dim=-1)

    @cached_property
    def _apart(self) -> Tensor:
        """Pixels between the centre of every patch and that of every key: (h·w, M)."""
        h, w = self.grid
        y = torch.arange(h).repeat_interleave(w) * float(self.pixels)
        x = torch.arange(w).repeat(h) * float(self.pixels)
        v, u = (y, x) if self.areas is None else (self.areas @ y, self.areas @ x)
        return torch.hypot(y[:, None] - v, x[:, None] - u)


Layout = Tokens | Windows


def original(model: AnyModule) -> AnyModule:
    """The model itself, if torch.compile has wrapped it."""
    return cast(AnyModule, getattr(model, "_orig_mod", model))


def attends(model: nn.Module) -> TypeGuard[Attentive]:
    """Whether there is attention to show: a BiT and a Mixer have none, nor has a CoAtNet whose stages all convolve."""
    return isinstance(model, Attentive) and any(isinstance(module, AnyAttention) for module in model.modules())


def attentions(model: nn.Module) -> list[AnyAttention]:
    """The layers that attend, from input to output; a UserError if there are none."""
    layers = [module for module in model.modules() if isinstance(module, AnyAttention)]
    if not layers:
        raise UserError(f"There is no attention to show: a {type(model).__name__} has none.")
    return layers


def layouts(model: Attentive) -> list[Layout]:
    """The layout of every layer that attends, from input to output."""
    model = original(model)
    found: list[Layout] = []
    for layer, (grid, pixels) in zip(attentions(model), _stages(model), strict=True):
        if isinstance(layer, WindowAttention):
            found.append(Windows(grid, pixels, layer.heads, layer.window, (layer.shift[0], layer.shift[1])))
        elif found and found[-1].pixels == pixels:
            found.append(found[-1])  # layers of a stage share theirs, whose distances may be large
        else:
            patches = grid[0] * grid[1]
            start = shares(model) if grid == model.config.grid else torch.full((patches,), 1 / patches)
            areas = _areas(layer, grid) if isinstance(layer, ReducedAttention) else None
            found.append(Tokens(grid, pixels, layer.heads, start, areas))
    return found


def _stages(model: Attentive) -> list[tuple[Grid, int]]:
    """The grid of every layer that attends, and the pixels from one of its patches to the next."""
    c = model.config
    if isinstance(model, ViT | Hybrid):
        return [(c.grid, c.img_size[0] // c.grid[0])] * len(model.blocks)
    first = model.config.convs if isinstance(model, CoAtNet) else 0
    finest = 2 ** (1 + model.config.shrink) if isinstance(model, CoAtNet) else model.config.patch
    stages = [
        [(grid, finest * 2**i)] * depth
        for i, (grid, depth) in enumerate(zip(model.config.grids, model.config.depths, strict=True))
    ]
    return [layer for stage in stages[first:] for layer in stage]


def _areas(layer: ReducedAttention, grid: Grid) -> Tensor | None:
    """Of which tokens each key of a reduced map is made: (M, h·w), every row adds up to one."""
    if layer.sr is None:
        return None
    averages = (
        partial(F.adaptive_avg_pool1d, output_size=7)
        if layer.linear
        else partial(F.avg_pool1d, kernel_size=layer.sr.stride[0])
    )
    down, across = (averages(torch.eye(side)[None])[0].T for side in grid)  # keys, tokens of a side
    return torch.kron(down, across)


def shares(model: Attentive) -> Tensor:
    """How much each token counts for what the head reads: (N,), adds up to one. Attention pooling decides by itself."""
    c = model.config
    patches = c.grid[0] * c.grid[1]
    prefix = c.length - patches
    pool, placed = ("cls" if prefix else "gap"), prefix
    if isinstance(model, ViT):
        pool, placed = model.config.pool, model.config.placed
    counts = torch.zeros(c.length)
    if pool in ("cls", "cls_dist", "cls_gap"):
        counts[:placed] = 1 / placed
    if pool not in ("cls", "cls_dist"):
        counts[prefix:] = 1 / patches
    return counts / counts.sum()


def refine(rows: Tensor, coarse: Grid, fine: Grid) -> Tensor:
    """Rows of patches, (B, h·w), shared out to the up to 2×2 of which each one was made in the stage before."""
    y, x = (torch.arange(side, device=rows.device) // 2 for side in fine)
    parent = (y[:, None] * coarse[1] + x).flatten()
    return rows[:, parent] / torch.bincount(parent)[parent]


def window_layouts(model: Swin) -> list[Windows]:
    """The windows of every layer."""
    return [layout for layout in layouts(model) if isinstance(layout, Windows)]
