"""Attention patterns of ViT-like models: which patches a patch attends to. No pattern has parameters.

    global                  all patches                                                   the paper
    window:7                those of its window of 7×7                                    https://arxiv.org/abs/2203.16527
    window:7,shift          the same; every second block shifts the windows by half       https://arxiv.org/abs/2103.14030
    axial                   those of its row, then of its column                          https://arxiv.org/abs/1912.12180
    neighbourhood:7         the 7×7 around it, moved inwards at the border                https://arxiv.org/abs/2204.07143
    strided, strided:14     every 14th, and those less than 14 before or after it in      https://arxiv.org/abs/1904.10509
                            row-major order; by default the number of columns

With `,global:4`, four blocks attend globally: the last of each quarter, as in ViTDet. Prefix tokens (class,
distillation, registers) attend to all tokens, and all tokens attend to them.

In axial attention one set of queries and keys serves both steps: A·v = columns·(rows·v). Prefix tokens are keys of the
first step. With one row it is global attention.

`forward` computes windows, axes and neighbourhoods by reshaping, in memory linear in the number of patches. A strided
pattern is a mask of all pairs of tokens. So are all patterns for a subset of the tokens, with relative positions, and
in `weights`.

Legend: B batch, H heads, N tokens, P prefix tokens, d width of a head, (h, w) patch grid.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.errors import UserError, nearest
from vitrail.models.layers import attend
from vitrail.models.position import Grid

_FORM = re.compile(r"(?P<kind>\w+)(?::(?P<size>\d+))?(?P<shift>,shift)?(?:,global:(?P<whole>\d+))?")


@dataclass(frozen=True)
class Choice:
    """The pattern of each block of an encoder."""

    kind: str
    size: int | None
    shift: bool
    whole: int  # blocks with global attention

    def layers(self, depth: int, grid: Grid, prefix: int) -> list[Pattern | None]:
        """The pattern of each block, None for global attention. Blocks with equal patterns share one."""
        if self.kind == "global" or (self.kind == "window" and max(grid) <= (self.size or 0)):
            return [None] * depth
        plain = KINDS[self.kind](grid, prefix, self.size)
        shifted = Window(grid, prefix, self.size, shift=True) if self.shift else plain
        ends = [self.whole * (i + 1) // depth > self.whole * i // depth for i in range(depth)]
        return [None if end else shifted if i % 2 else plain for i, end in enumerate(ends)]


def choice(text: str, depth: int) -> Choice:
    """Reads the option `attention` of a model with this many blocks; raises UserError if it is invalid."""
    match = _FORM.fullmatch(text)
    kind = match["kind"] if match else text.partition(":")[0]
    if match is None or kind not in ("global", *KINDS):
        raise UserError(
            "'attention' must be global, window:SIZE, axial, neighbourhood:SIZE, strided or strided:STRIDE, also with "
            f"',shift' for windows and ',global:BLOCKS', but it is '{text}'.{nearest(kind, KINDS)}"
        )
    found = Choice(kind, int(match["size"]) if match["size"] else None, bool(match["shift"]), int(match["whole"] or 0))
    sized = {"window": True, "neighbourhood": True, "strided": None}.get(kind, False)
    rules = (
        (sized is not True or found.size is not None, f"needs a size, such as '{kind}:7'"),
        (sized is not False or found.size is None, "has no size"),
        (found.size is None or found.size >= 1, "needs a size of at least 1"),
        (kind != "neighbourhood" or (found.size or 0) % 2, "needs an odd size, with as many patches on either side"),
        (kind == "window" or not found.shift, "cannot be shifted; only windows can"),
        (kind != "global" or not match["whole"], "is global in every block"),
        (match["whole"] is None or 1 <= found.whole <= depth, f"must have from 1 to {depth} global blocks"),
    )
    for fine, rule in rules:
        if not fine:
            raise UserError(f"'{kind}' attention {rule}, but 'attention' is '{text}'.")
    return found


class Pattern(nn.Module):
    """Which patches of a grid a patch attends to."""

    def __init__(self, grid: Grid, prefix: int, size: int | None):
        super().__init__()
        self.grid, self.prefix, self.size = grid, prefix, size

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, keep: Tensor | None = None
    ) -> Tensor:
        """Attention of queries, keys and values, each (B, H, N, d). `keep` as in `layers.Attention`."""
        if bias is None and keep is None:
            patches = self.local(q[:, :, self.prefix :], k, v)
            return torch.cat([attend(q[:, :, : self.prefix], k, v), patches], dim=2) if self.prefix else patches
        for mask in self.masks(keep, q.device):
            v = attend(q, k, v, mask if bias is None else bias.masked_fill(~mask, -torch.inf))
        return v

    def weights(self, logits: Tensor, keep: Tensor | None = None) -> Tensor:
        """The attention weights of logits: (B, H, N, N)."""
        first, *more = (logits.masked_fill(~mask, -torch.inf) for mask in self.masks(keep, logits.device))
        weights = first.softmax(dim=-1)
        for step in more:
            weights = step.softmax(dim=-1) @ weights
        return weights

    def masks(self, keep: Tensor | None = None, device: torch.device | str = "cpu") -> list[Tensor]:
        """For each step, whether tokens attend to each other: (N, N), or (B, 1, n, n) for the tokens `keep`, (B, n)."""
        tokens = torch.arange(self.prefix + self.grid[0] * self.grid[1], device=device) if keep is None else keep
        (y, x), first = self._places(tokens), tokens < self.prefix
        across, down = (y[..., :, None], x[..., :, None]), (y[..., None, :], x[..., None, :])
        near, *more = self.pairs(*across, *down)
        special = first[..., :, None] | first[..., None, :]
        same = tokens[..., :, None] == tokens[..., None, :]
        masks = [near | special, *(pairs & ~special | same for pairs in more)]
        return [mask.unsqueeze(1) for mask in masks] if tokens.ndim == 2 else masks

    def _places(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The row and column of tokens, of any value for prefix tokens."""
        places = (tokens - self.prefix).clamp(min=0)
        return places // self.grid[1], places % self.grid[1]

    def even(self) -> Tensor:
        """Uniform attention of every patch to patches: (h·w, h·w)."""
        weights = self.weights(torch.zeros(1, 1, 1, 1, device="cpu"))[0, 0, self.prefix :, self.prefix :]
        return weights / weights.sum(dim=-1, keepdim=True)

    def pairs(self, y: Tensor, x: Tensor, v: Tensor, u: Tensor) -> list[Tensor]:
        """For each step, whether the patch in row y and column x attends to that in row v and column u."""
        raise NotImplementedError

    def local(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of the queries of patches, (B, H, h·w, d), to keys and values of all tokens."""
        raise NotImplementedError

    def _map(self, x: Tensor) -> Tensor:
        """The patches of all tokens, or of patches only, as maps: (B·H, h, w, d)."""
        h, w = self.grid
        return x[:, :, -h * w :].reshape(-1, h, w, x.shape[3])

    def _with_prefix(self, groups: Tensor, x: Tensor) -> Tensor:
        """Groups of keys, (B·H, G, n, d), each with the prefix tokens of all keys: (B·H, G, P + n, d)."""
        if not self.prefix:
            return groups
        prefix = x[:, :, : self.prefix].flatten(0, 1).unsqueeze(1)
        return torch.cat([prefix.expand(-1, groups.shape[1], -1, -1), groups], dim=2)


class Window(Pattern):
    """Windows that tile the grid. Those at the border are smaller if the sides are no multiples, or if shifted."""

    mask: Tensor | None

    def __init__(self, grid: Grid, prefix: int, size: int | None, shift: bool = False):
        super().__init__(grid, prefix, size)
        assert size is not None
        self.window = [min(size, side) for side in grid]
        self.shift = [each // 2 if shift and each < side else 0 for each, side in zip(self.window, grid, strict=True)]
        self.full = [-(-side // each) * each for each, side in zip(self.window, grid, strict=True)]
        self.register_buffer("mask", self._mask(), persistent=False)

    def pairs(self, y: Tensor, x: Tensor, v: Tensor, u: Tensor) -> list[Tensor]:
        (dy, dx), (h, w) = self.shift, self.window
        return [((y - dy) // h == (v - dy) // h) & ((x - dx) // w == (u - dx) // w)]

    def local(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = (self._with_prefix(self._cut(self._map(x)), x) for x in (k, v))
        mask = None if self.mask is None else self.mask.to(q.device)
        return self._join(attend(self._cut(self._map(q)), keys, values, mask)).reshape(q.shape)

    def _cut(self, x: Tensor) -> Tensor:
        """Pads and shifts a map, then splits it into windows: (B·H, h, w, d) → (B·H, W, n, d)."""
        (h, w), (full_h, full_w), (n, m) = self.grid, self.full, self.window
        x = F.pad(x, (0, 0, 0, full_w - w, 0, full_h - h)) if (full_h, full_w) != (h, w) else x
        x = torch.roll(x, (-self.shift[0], -self.shift[1]), dims=(1, 2)) if any(self.shift) else x
        x = x.reshape(-1, full_h // n, n, full_w // m, m, x.shape[3])
        return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)

    def _join(self, x: Tensor) -> Tensor:
        """The inverse of `_cut`."""
        (h, w), (full_h, full_w), (n, m) = self.grid, self.full, self.window
        x = x.reshape(-1, full_h // n, full_w // m, n, m, x.shape[3]).transpose(2, 3).flatten(3, 4).flatten(1, 2)
        x = torch.roll(x, (self.shift[0], self.shift[1]), dims=(1, 2)) if any(self.shift) else x
        return x[:, :h, :w]

    def _mask(self) -> Tensor | None:
        """The pairs of tokens that attend in each window after padding and shifting: (W, n, P + n); None if all do."""
        y, x = (
            (torch.arange(side, device="cpu") - shift) // each + 1
            for side, shift, each in zip(self.grid, self.shift, self.window, strict=True)
        )
        numbers = 1 + y[:, None] * (self.grid[1] + 2) + x  # of the windows; padding has number 0
        parts = self._cut(numbers[None, :, :, None])[0, :, :, 0]  # W n
        mask = parts[:, :, None] == parts[:, None]
        return None if mask.all() else F.pad(mask, (self.prefix, 0), value=True)


class Axial(Pattern):
    """The row, then the column."""

    def pairs(self, y: Tensor, x: Tensor, v: Tensor, u: Tensor) -> list[Tensor]:
        return [y == v, x == u]

    def local(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, queries = self._map(k), self._map(q)
        mixed = attend(queries, self._with_prefix(keys, k), self._with_prefix(self._map(v), v))  # B·H h w d
        mixed = attend(queries.transpose(1, 2), keys.transpose(1, 2), mixed.transpose(1, 2))  # B·H w h d
        return mixed.transpose(1, 2).reshape(q.shape)


class Neighbourhood(Pattern):
    """The patches around: each row of queries attends to the rows around it, with one mask of columns."""

    mask: Tensor
    rows: Tensor

    def __init__(self, grid: Grid, prefix: int, size: int | None):
        super().__init__(grid, prefix, size)
        assert size is not None
        self.window = [min(size, side) for side in grid]
        begin = self._begin(torch.arange(grid[0], device="cpu"), 0)
        self.register_buffer("rows", begin[:, None] + torch.arange(self.window[0], device="cpu"), persistent=False)
        columns = torch.arange(grid[1], device="cpu")
        near = self._near(columns[:, None], columns, 1).repeat(1, self.window[0])  # w, rows·w
        self.register_buffer("mask", F.pad(near, (prefix, 0), value=True), persistent=False)

    def pairs(self, y: Tensor, x: Tensor, v: Tensor, u: Tensor) -> list[Tensor]:
        return [self._near(y, v, 0) & self._near(x, u, 1)]

    def local(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = (self._with_prefix(self._around(self._map(x)), x) for x in (k, v))
        return attend(self._map(q), keys, values, self.mask.to(q.device)).reshape(q.shape)

    def _around(self, x: Tensor) -> Tensor:
        """For each row of a map, the rows around it: (B·H, h, rows·w, d)."""
        found = x.index_select(1, self.rows.to(x.device).flatten())
        return found.reshape(-1, self.grid[0], self.window[0] * self.grid[1], x.shape[3])

    def _begin(self, places: Tensor, axis: int) -> Tensor:
        """The first neighbour of places along an axis."""
        size = self.window[axis]
        return (places - size // 2).clamp(0, self.grid[axis] - size)

    def _near(self, places: Tensor, others: Tensor, axis: int) -> Tensor:
        begin = self._begin(places, axis)
        return (begin <= others) & (others < begin + self.window[axis])


class Strided(Pattern):
    """Every s-th patch, and those less than s places away, in row-major order."""

    mask: Tensor

    def __init__(self, grid: Grid, prefix: int, size: int | None):
        super().__init__(grid, prefix, size)
        self.stride = size or grid[1]
        self.register_buffer("mask", self.masks()[0][prefix:], persistent=False)

    def pairs(self, y: Tensor, x: Tensor, v: Tensor, u: Tensor) -> list[Tensor]:
        apart = (y - v) * self.grid[1] + (x - u)
        return [(apart.abs() < self.stride) | (apart % self.stride == 0)]

    def local(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, self.mask.to(q.device))


KINDS: dict[str, type[Pattern]] = {
    "window": Window,
    "axial": Axial,
    "neighbourhood": Neighbourhood,
    "strided": Strided,
}
