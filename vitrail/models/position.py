"""Position embeddings: the variants that the paper compares, and their resampling.

`learned` is the paper's choice, one row per token; `patches` has none for the class token. `learned2d` concatenates a
row and a column table; `sincos2d` is fixed; `relative` is a bias on the attention logits, learned per head and offset.
With `_every` or `_shared`, learned positions are added before every block: tables of its own, or those of the input.

Legend: N tokens, D width, H heads, (h, w) patch grid; prefix tokens (class, distillation, registers) come first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.errors import UserError, nearest

Grid = tuple[int, int]

# How position embeddings are resampled at another image size. Libraries differ, and weights keep the way of theirs.
Interpolation = Literal[
    "bicubic",  # antialiased: timm, DINOv2 with registers
    "bicubic_plain",  # Hugging Face, DeiT, MAE
    "bicubic_offset",  # plain, with 0.1 added to the new size in the scale: DINO, and DINOv2 without registers
    "bicubic_aligned",  # plain, with aligned corners: torchvision
    "bilinear",  # antialiased
    "bilinear_plain",  # PVT
    "linear",  # bilinear with aligned corners: the paper's, `scipy.ndimage.zoom` of order 1
]
_OFFSET = 0.1


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


def every_layer(config: Any, shared: Callable[[], Tensor | None]) -> Place | None:
    """What adds positions before a block after the first, as in table 8 of the paper; `shared` gives the input's."""
    c, patches = config, config.grid[0] * config.grid[1]
    if c.pos.endswith("_every"):
        return Place(Positions(c.kind == "learned2d", c.grid, c.placed, c.width), c.length, patches)
    return Place(shared, c.length, patches) if c.pos.endswith("_shared") else None


def crossed(rows: Tensor, columns: Tensor) -> Tensor:
    """Two-dimensional positions, (1, h·w, D), of a row and a column table, (1, h, D/2) and (1, w, D/2)."""
    h, w = rows.shape[1], columns.shape[1]
    pair = [rows.unsqueeze(2).expand(-1, -1, w, -1), columns.unsqueeze(1).expand(-1, h, -1, -1)]
    return torch.cat(pair, dim=-1).flatten(1, 2)


def resample(rows: Tensor, old: Grid, new: Grid, method: Interpolation = "bicubic") -> Tensor:
    """Resizes the rows of an `old` grid, (h·w, D), to a `new` grid."""
    if old == new:
        return rows
    picture = rows.float().T.reshape(1, -1, *old)
    if new[1] == 1:  # transposed: torch 2.13 on CPU returns wrong results for one column
        picture, old, new = picture.mT, old[::-1], (1, new[0])
    mode, _, how = ("bilinear_aligned" if method == "linear" else method).partition("_")
    if how == "offset":  # DINO's guard against rounding down also shifts the sampled points
        scale = tuple((after + _OFFSET) / before for before, after in zip(old, new, strict=True))
        picture = F.interpolate(picture, scale_factor=scale, mode=mode)
    else:
        picture = F.interpolate(picture, size=new, mode=mode, antialias=not how, align_corners=how == "aligned")
    return picture.reshape(rows.shape[1], -1).T.to(rows.dtype)


def resample_offsets(table: Tensor, old: Grid, new: Grid) -> Tensor:
    """Resizes biases of the offsets in an `old` grid, ((2h-1)·(2w-1), H), to those in a `new` grid, as in timm.

    An offset of one patch keeps its bias; the other known offsets are spread over the new range in a geometric
    progression, with linear interpolation between them.
    """
    if old == new:
        return table
    picture = table.float().reshape(2 * old[0] - 1, 2 * old[1] - 1, -1)
    for axis in (0, 1):
        known = _spread(old[axis] - 1, new[axis] - 1)
        at = np.arange(1 - new[axis], new[axis])
        place = np.interp(at, known, np.arange(len(known)))
        low = torch.from_numpy(place).floor().long().clamp(max=len(known) - 1)
        high = (low + 1).clamp(max=len(known) - 1)
        share = torch.from_numpy(place).to(picture).sub(low).view(-1, *[1] * 2)
        picture = picture.transpose(0, axis)
        picture = torch.lerp(picture[low], picture[high], share).transpose(0, axis)
    return picture.flatten(0, 1).to(table.dtype)


def _spread(old: int, new: int) -> NDArray[np.float64]:
    """The places of the offsets -old … old in the range -new … new: 1, 1 + q, 1 + q + q², …, and their negatives."""
    low, high = 1.01, 1.5
    while high - low > 1e-6:  # the q for which the last one is at the end of the range
        q = (low + high) / 2
        low, high = (low, q) if (1 - q**old) / (1 - q) > new else (q, high)
    places = np.cumsum(((low + high) / 2) ** np.arange(old))
    return np.concatenate([-places[::-1], [0], places])


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
