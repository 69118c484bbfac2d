"""Geometry of attention: where the tokens and keys of each layer of `Model.attentions` lie in the image.

    ViT, hybrid, CoAtNet    global attention, or a pattern of patches           `Tokens`
    PVT, PVT v2             reduced keys, each computed from an area of tokens  `Tokens` with `areas`
    Swin                    attention within windows                            `Windows`

A geometry takes the weights of its layer, (B, H, N, M) or (B, W, H, n, n) for windows. `follow` maps them back to the
patches, `distance` measures how far they reach.

Legend: B batch, H heads, N tokens, M keys, (h, w) the patch grid of a stage, W windows of n tokens each. Prefix tokens
(class, registers) come first.
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
from vitrail.models.patterns import Pattern
from vitrail.models.position import Grid

AnyModule = TypeVar("AnyModule", bound=nn.Module)


@dataclass(frozen=True, eq=False)
class Tokens:
    """Global attention, with the tokens or reduced areas of them as keys, or attention in a pattern."""

    grid: Grid
    pixels: int  # stride of a patch
    heads: int
    start: Tensor  # N: weight of each token in the head's input; uniform over patches in earlier stages
    areas: Tensor | None = None  # M h·w: share of each patch in each key; None if the tokens are the keys
    pattern: Pattern | None = None  # which patches attend to which; None if all do

    @property
    def prefix(self) -> int:
        """Number of tokens that are not patches."""
        return len(self.start) - self.grid[0] * self.grid[1]

    @property
    def size(self) -> int:
        """Number of weights per image."""
        return self.heads * len(self.start) * (len(self.start) if self.areas is None else len(self.areas))

    @property
    def even(self) -> float:
        """The attention distance of uniform attention, or of such attention within the pattern, in pixels."""
        if self.pattern is None:
            return self._apart.mean().item()
        return (self._apart * self.pattern.even()).sum(dim=-1).mean().item()

    def follow(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Attention of each head from a weighted mean of tokens, `rows` (B or 1, N): (B, H, N)."""
        reached = (rows[:, None, None].to(weights) @ weights)[:, :, 0]  # B H M
        return reached if self.areas is None else reached @ self.areas.to(weights)

    def distance(self, weights: Tensor) -> Tensor:
        """Mean attention distance of each head in pixels, from patch centre to key centre: (B, H)."""
        between = weights[:, :, self.prefix :, self.prefix :]
        far = torch.einsum("bhqk,qk->bhq", between, self._apart.to(between.device)) / between.sum(dim=-1)
        return far.mean(dim=-1)

    @cached_property
    def _apart(self) -> Tensor:
        """Distances in pixels between patch centres and key centres: (h·w, M)."""
        h, w = self.grid
        y = torch.arange(h).repeat_interleave(w) * float(self.pixels)
        x = torch.arange(w).repeat(h) * float(self.pixels)
        v, u = (y, x) if self.areas is None else (self.areas @ y, self.areas @ x)
        return torch.hypot(y[:, None] - v, x[:, None] - u)


Geometry = Tokens | Windows


def original(model: AnyModule) -> AnyModule:
    """The model without the wrapper of torch.compile."""
    return cast(AnyModule, getattr(model, "_orig_mod", model))


def attends(model: Model) -> bool:
    """Whether the model has attention; BiT, Mixer and a purely convolutional CoAtNet do not."""
    return bool(original(model).attentions())


def attentions(model: Model) -> list[AttentionLayer]:
    """The attention layers from input to output; a UserError if there are none."""
    layers = original(model).attentions()
    if not layers:
        raise UserError(f"There are no attention maps: a {type(original(model)).__name__} has no attention layers.")
    return layers


def geometries(model: Model) -> list[Geometry]:
    """The geometry of every attention layer, from input to output."""
    model = original(model)
    found: list[Geometry] = []
    for layer in attentions(model):
        if layer.window:
            found.append(Windows(layer.grid, layer.pixels, layer.module.heads, layer.window, layer.shift))
        elif same := [
            g for g in found if isinstance(g, Tokens) and (g.pixels, g.pattern) == (layer.pixels, layer.pattern)
        ]:
            found.append(same[0])  # shared within a stage: its distance matrix may be large
        else:
            patches = layer.grid[0] * layer.grid[1]
            last = layer.grid == model.config.grid
            start = model.shares() if last else torch.full((patches,), 1 / patches)
            found.append(Tokens(layer.grid, layer.pixels, layer.module.heads, start, layer.areas, layer.pattern))
    return found


def refine(rows: Tensor, coarse: Grid, fine: Grid) -> Tensor:
    """Splits rows of patches, (B, h·w), evenly among the up to 2×2 patches that each one merges."""
    y, x = (torch.arange(side, device=rows.device) // 2 for side in fine)
    parent = (y[:, None] * coarse[1] + x).flatten()
    return rows[:, parent] / torch.bincount(parent)[parent]


def window_geometries(model: Model) -> list[Windows]:
    """The windows of every layer with window attention."""
    return [geometry for geometry in geometries(model) if isinstance(geometry, Windows)]
