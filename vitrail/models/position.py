"""Position embeddings: the variants that the paper compares, and their resampling.

`learned` is the paper's choice, one row per token; `patches` has none for the class token. `learned2d` concatenates a
row and a column table; `sincos2d` is fixed; `relative` is a bias on the attention logits, learned per head and offset.
With `_every` or `_shared`, learned positions are added before every block: tables of its own, or those of the input.

Legend: N tokens, D width, H heads, (h, w) patch grid; prefix tokens (class, distillation, registers) come first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.errors import UserError, nearest

Grid = tuple[int, int]
Interpolation = Literal["bicubic", "bilinear", "linear"]  # "linear" is the paper's


def sincos2d(grid: Grid, width: int, device: torch.device | None = None, endpoint: bool = True) -> Tensor:
    """Fixed 2-D sine-cosine position embeddings: (h·w, D).

    Frequencies fall from 1 to 1/10,000, as in big_vision; without `endpoint` they stop one step before, as in MoCo v3
    and MAE.
    """
    h, w = grid
    y, x = torch.meshgrid(
        torch.arange(h, device=device, dtype=torch.float32),
        torch.arange(w, device=device, dtype=torch.float32),
        indexing="ij",
    )
    quarter = width // 4
    steps = torch.arange(quarter, device=device, dtype=torch.float32) / max(quarter - endpoint, 1)
    frequency = 1.0 / 10_000**steps
    y, x = y.reshape(-1, 1) * frequency, x.reshape(-1, 1) * frequency
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1)


def offsets(grid: Grid, device: torch.device) -> Tensor:
    """The index, among the (2h-1)·(2w-1) offsets of a grid in row-major order, of each pair of positions: (N, N)."""
    h, w = grid
    y = torch.arange(h, device=device).repeat_interleave(w)
    x = torch.arange(w, device=device).repeat(h)
    return (y[:, None] - y + h - 1) * (2 * w - 1) + (x[:, None] - x + w - 1)


class RelativeBias(nn.Module):
    """Relative position bias: learned per head and offset between two patches, added to the attention logits.

    Prefix tokens have no grid position: three more rows serve prefix→patch, patch→prefix and prefix→prefix. Layout and
    parameter name are BEiT's.
    """

    def __init__(self, grid: Grid, heads: int, prefix: int):
        super().__init__()
        self.grid, self.prefix = grid, prefix
        rows = (2 * grid[0] - 1) * (2 * grid[1] - 1) + (3 if prefix else 0)
        self.table = nn.Parameter(torch.zeros(rows, heads))

    def forward(self, keep: Tensor | None = None) -> Tensor:
        """The bias of all pairs of tokens, (1, H, N, N), or of those with indices `keep`, (n,) or (B, n)."""
        index = self.index()
        if keep is not None:
            index = index[keep[..., :, None], keep[..., None, :]]  # n n, or B n n
        bias = self.table[index]
        return bias.permute(2, 0, 1).unsqueeze(0) if bias.ndim == 3 else bias.permute(0, 3, 1, 2)  # 1 or B, H N N

    def index(self) -> Tensor:
        """The table row of each pair of tokens: (N, N)."""
        h, w = self.grid
        index = offsets(self.grid, self.table.device)
        if self.prefix:
            rows = (2 * h - 1) * (2 * w - 1)
            index = F.pad(index, (0, 0, self.prefix, 0), value=rows)
            index = F.pad(index, (self.prefix, 0, 0, 0), value=rows + 1)
            index[: self.prefix, : self.prefix] = rows + 2
        return index


class Positions(nn.Module):
    """Learned positions of a block: one row per token with a position, or a row and a column table."""

    def __init__(self, two: bool, grid: Grid, placed: int, width: int):
        super().__init__()
        self.two, self.grid = two, grid
        if two:
            self.pos_row = nn.Parameter(torch.zeros(1, grid[0], width // 2))
            self.pos_col = nn.Parameter(torch.zeros(1, grid[1], width // 2))
        else:
            self.pos_embed = nn.Parameter(torch.zeros(1, placed + grid[0] * grid[1], width))

    def forward(self) -> Tensor:
        return crossed(self.pos_row, self.pos_col) if self.two else self.pos_embed


class Place(nn.Module):
    """Adds position embeddings before a block; `table` is a module, or for those of the input a method of the model."""

    def __init__(self, table: Callable[[], Tensor | None], tokens: int, patches: int):
        super().__init__()
        self.own = table if isinstance(table, nn.Module) else None
        self.shared = None if isinstance(table, nn.Module) else table
        self.tokens, self.patches = tokens, patches

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        rows: Tensor = self.own() if self.own is not None else self.shared()  # type: ignore[misc,assignment]
        placed = rows.shape[1] - self.patches
        between = rows.new_zeros(1, self.tokens - rows.shape[1], rows.shape[2])  # tokens without a position
        rows = torch.cat([rows[:, :placed], between, rows[:, placed:]], dim=1)
        if keep is not None:
            rows = rows.take_along_dim(keep.reshape(-1, keep.shape[-1], 1), dim=1)
        return x + rows


def crossed(rows: Tensor, columns: Tensor) -> Tensor:
    """Two-dimensional positions, (1, h·w, D), of a row and a column table, (1, h, D/2) and (1, w, D/2)."""
    h, w = rows.shape[1], columns.shape[1]
    pair = [rows.unsqueeze(2).expand(-1, -1, w, -1), columns.unsqueeze(1).expand(-1, h, -1, -1)]
    return torch.cat(pair, dim=-1).flatten(1, 2)


def resample(rows: Tensor, old: Grid, new: Grid, method: Interpolation = "bicubic") -> Tensor:
    """Resizes the rows of an `old` grid, (h·w, D), to a `new` grid.

    `bicubic` and `bilinear` are antialiased, as for images; `linear` is `scipy.ndimage.zoom` of order 1, used by the
    paper's authors, with aligned corners.
    """
    if old == new:
        return rows
    picture = rows.float().T.reshape(1, -1, *old)
    if new[1] == 1:  # transposed: torch 2.13 on CPU returns wrong results for one column
        picture, new = picture.mT, (1, new[0])
    if method == "linear":
        picture = F.interpolate(picture, size=new, mode="bilinear", align_corners=True)
    else:
        picture = F.interpolate(picture, size=new, mode=method, antialias=True, align_corners=False)
    return picture.reshape(rows.shape[1], -1).T.to(rows.dtype)


def resample_state(
    state: Mapping[str, Tensor], old: Grid, new: Grid, method: Interpolation = "bicubic"
) -> dict[str, Tensor]:
    """A copy of a state dict with position embeddings resampled to another patch grid; prefix rows are kept."""
    if method not in get_args(Interpolation):
        known = get_args(Interpolation)
        raise UserError(
            f"The resampling method must be one of {', '.join(known)}, but it is '{method}'.{nearest(method, known)}"
        )
    resampled = dict(state)
    if old == new:
        return resampled
    offsets_old, offsets_new = (2 * old[0] - 1, 2 * old[1] - 1), (2 * new[0] - 1, 2 * new[1] - 1)
    for path, value in state.items():
        name = path.rpartition(".")[2] if ".place." in path else path
        if name == "pos_embed":
            prefix = value.shape[1] - old[0] * old[1]
            patches = resample(value[0, prefix:], old, new, method)
            resampled[path] = torch.cat([value[0, :prefix], patches])[None]
        elif name == "pos_row":
            resampled[path] = resample(value[0], (old[0], 1), (new[0], 1), method)[None]
        elif name == "pos_col":
            resampled[path] = resample(value[0], (1, old[1]), (1, new[1]), method)[None]
        elif name.endswith("relative.table"):
            count = offsets_old[0] * offsets_old[1]
            resampled[path] = torch.cat([resample(value[:count], offsets_old, offsets_new, method), value[count:]])
    return resampled
