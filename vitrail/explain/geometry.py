"""Where in the picture the tokens and keys of each layer that attends lie, as `Model.attentions` says.

    ViT, hybrid, CoAtNet    every token attends to all tokens                             `Tokens`
    PVT, PVT v2             every token attends to keys, each made of an area of tokens   `Tokens` with `areas`
    Swin                    every token attends to those of its window                    `Windows`

A geometry reads the weights that its layer gives, (B, H, N, M) or of windows (B, W, H, n, n), and answers two
questions: what is reached from given tokens, and how far that is.

Legend: B batch, H heads, N tokens, M keys, (h, w) the grid of patches of a stage, W windows of n tokens each. Tokens
that are no patch (class, registers) come first.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from vitrail.errors import UserError
from vitrail.explain.windows import Windows
from vitrail.models import Model
from vitrail.models.model import AttentionLayer
from vitrail.models.position import Grid

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


Geometry = Tokens | Windows


def original(model: AnyModule) -> AnyModule:
    """The model itself, if torch.compile has wrapped it."""
    return cast(AnyModule, getattr(model, "_orig_mod", model))


def attends(model: Model) -> bool:
    """Whether there is attention to show: a BiT and a Mixer have none, nor has a CoAtNet whose stages all convolve."""
    return bool(original(model).attentions())


def attentions(model: Model) -> list[AttentionLayer]:
    """The layers that attend, from input to output; a UserError if there are none."""
    layers = original(model).attentions()
    if not layers:
        raise UserError(f"There is no attention to show: a {type(original(model)).__name__} has none.")
    return layers


def geometries(model: Model) -> list[Geometry]:
    """The geometry of every layer that attends, from input to output."""
    model = original(model)
    found: list[Geometry] = []
    for layer in attentions(model):
        if layer.window:
            found.append(Windows(layer.grid, layer.pixels, layer.module.heads, layer.window, layer.shift))
        elif found and found[-1].pixels == layer.pixels:
            found.append(found[-1])  # layers of a stage share theirs, whose distances may be large
        else:
            patches = layer.grid[0] * layer.grid[1]
            last = layer.grid == model.config.grid
            start = model.shares() if last else torch.full((patches,), 1 / patches)
            found.append(Tokens(layer.grid, layer.pixels, layer.module.heads, start, layer.areas))
    return found


def refine(rows: Tensor, coarse: Grid, fine: Grid) -> Tensor:
    """Rows of patches, (B, h·w), shared out to the up to 2×2 of which each one was made in the stage before."""
    y, x = (torch.arange(side, device=rows.device) // 2 for side in fine)
    parent = (y[:, None] * coarse[1] + x).flatten()
    return rows[:, parent] / torch.bincount(parent)[parent]


def window_geometries(model: Model) -> list[Windows]:
    """The windows of every layer that attends within windows."""
    return [geometry for geometry in geometries(model) if isinstance(geometry, Windows)]
