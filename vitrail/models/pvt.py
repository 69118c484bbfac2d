"""Pyramid Vision Transformer: "A Versatile Backbone for Dense Prediction without Convolutions",
https://arxiv.org/abs/2102.12122.

A ViT in four stages of decreasing resolution and increasing width. Spatial-reduction attention shortens the keys and
values of the high-resolution stages: a strided convolution merges R×R tokens into one:

    SRA(Q, K, V) = softmax(Q·SR(K)ᵀ/√d)·SR(V),   SR(x) = LN(Reshape(x, R)·W)     (1, 2)  `ReducedAttention`

Every stage has its own learned position embeddings. The class token joins in the last stage.

Differences from the paper: none. Parameter names and initialisation follow the authors' code, with a zero head.

Legend: B batch, N tokens, M keys, D width, H heads, K classes, (h, w) token map.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import Ints
from vitrail.errors import UserError
from vitrail.models.layers import Dropout, DropPath, Mlp, Stage, as_map, attend, head_of
from vitrail.models.model import AttentionLayer, Model, ModelConfig
from vitrail.models.position import Grid, Interpolation, resample
from vitrail.models.validate import check_counts, check_heads, check_images, check_multiple, check_rates, check_stages


@dataclass(frozen=True)
class PVTConfig(ModelConfig):
    widths: Ints  # of the tokens of each stage
    depths: Ints  # blocks of each stage
    heads: Ints  # of each stage
    ratios: Ints  # hidden units of the MLPs, as multiples of the width
    reductions: Ints  # R of each stage: R×R tokens become one key
    patch: int = 4  # of the first stage; the others have patches of 2×2
    img_size: tuple[int, int] = (224, 224)
    channels: int = 3
    classes: int = 1000
    drop: float = 0.0
    drop_path: float = 0.0
    eps: float = 1e-5  # of the norms of patches and keys; transformers uses 1e-6 there too
    resample: Interpolation = "bilinear_plain"  # of position embeddings at another image size, as the authors do

    def __post_init__(self) -> None:
        check_counts(self, "widths", "depths", "heads", "ratios", "reductions", "patch")
        check_stages(self, "depths", "heads", "ratios", "reductions")
        check_rates(self)
        check_heads(self.widths, self.heads)
        check_multiple(self, self.stride, "the stride")
        check_reductions(self.grids, self.reductions)
        if self.reductions[-1] != 1:
            raise UserError("The last of 'reductions' must be 1, because its stage has a class token.")

    @property
    def stride(self) -> int:
        """Pixels per token of the last stage."""
        return self.patch * 2 ** (len(self.widths) - 1)

    @property
    def step(self) -> int:
        """The image sides must be multiples of this."""
        return self.stride

    @property
    def width(self) -> int:
        """The width of the last stage."""
        return self.widths[-1]

    @property
    def grids(self) -> list[Grid]:
        """Rows and columns of the token map of each stage."""
        strides = [self.patch * 2**i for i in range(len(self.widths))]
        return [(self.img_size[0] // stride, self.img_size[1] // stride) for stride in strides]

    @property
    def grid(self) -> Grid:
        """Rows and columns of the last feature map."""
        return self.grids[-1]

    @property
    def length(self) -> int:
        """Tokens of the last stage, class token included."""
        return 1 + self.grid[0] * self.grid[1]


def check_reductions(grids: list[Grid], reductions: Ints) -> None:
    """Checks that every token map is large enough for its reduction."""
    for (h, w), reduction in zip(grids, reductions, strict=True):
        if min(h, w) < reduction:
            raise UserError(
                f"A stage of {h}x{w} tokens cannot be reduced by {reduction}x{reduction}. "
                "Use larger images or smaller 'reductions'."
            )


def _pvt(*depths: int) -> PVTConfig:
    return PVTConfig((64, 128, 320, 512), depths, (1, 2, 5, 8), (8, 8, 4, 4), (8, 4, 2, 1))


# Table 1 of the paper, and our own nano for images of 28 to 64 pixels.
CONFIGS = {
    "pvt_nano": PVTConfig((48, 96, 192), (2, 2, 1), (3, 6, 12), (4, 4, 4), (4, 2, 1), patch=2, img_size=(32, 32)),
    "pvt_ti": _pvt(2, 2, 2, 2),
    "pvt_s": _pvt(3, 4, 6, 3),
    "pvt_m": _pvt(3, 4, 18, 3),
    "pvt_l": _pvt(3, 8, 27, 3),
}


class ReducedAttention(nn.Module):
    """Multi-head attention with spatially reduced keys and values: equations 1 and 2.

    `linear` is PVT v2's variant: average pooling to 7×7 keys, so the cost is linear in the number of tokens.
    """

    def __init__(self, width: int, heads: int, reduction: int, drop: float, linear: bool = False, eps: float = 1e-5):
        super().__init__()
        self.heads = heads
        self.linear = linear
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * width)
        self.proj = nn.Linear(width, width)
        self.drop = Dropout(drop)
        reduces = reduction > 1 or linear
        size = 1 if linear else reduction
        self.sr = nn.Conv2d(width, width, size, stride=size) if reduces else None
        self.norm = nn.LayerNorm(width, eps) if reduces else None

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        q, k, v = self._split(x, grid)
        x = attend(q, k, v).transpose(1, 2).flatten(2)  # B N D
        return self.drop(self.proj(x))

    def weights(self, x: Tensor, grid: Grid) -> Tensor:
        """The attention weights that `forward` applies, of each token to the reduced keys: (B, H, N, M)."""
        q, k, _ = self._split(x, grid)
        return (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(dim=-1)

    def areas(self, grid: Grid) -> Tensor | None:
        """The share of each token in each key, (M, h·w); None if the keys are not reduced."""
        if self.sr is None:
            return None
        average = (
            partial(F.adaptive_avg_pool1d, output_size=7)
            if self.linear
            else partial(F.avg_pool1d, kernel_size=self.sr.stride[0])
        )
        down, across = (average(torch.eye(side)[None])[0].T for side in grid)  # (keys, tokens) of a side
        return torch.kron(down, across)

    def _split(self, x: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
        q = self.q(x).unflatten(2, (self.heads, -1)).transpose(1, 2)  # B H N D/H
        if self.sr is not None and self.norm is not None:
            picture = x.transpose(1, 2).reshape(x.shape[0], x.shape[2], *grid)  # B D h w
            picture = F.adaptive_avg_pool2d(picture, 7) if self.linear else picture
            x = self.norm(self.sr(picture).flatten(2).transpose(1, 2))  # B M D
            x = F.gelu(x) if self.linear else x
        k, v = self.kv(x).unflatten(2, (2, self.heads, -1)).unbind(2)  # B M H D/H
        return q, k.transpose(1, 2), v.transpose(1, 2)


class PVTBlock(nn.Module):
    """One pre-norm encoder block with reduced attention."""

    def __init__(self, c: PVTConfig, i: int, drop_path: float):
        super().__init__()
        width = c.widths[i]
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = ReducedAttention(width, c.heads[i], c.reductions[i], c.drop, eps=c.eps)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = Mlp(width, c.ratios[i] * width, c.drop)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        x = x + self.drop_path(self.attn(self.norm1(x), grid))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class PatchEmbed(nn.Module):
    """Splits a feature map into patches; projects and normalises each one."""

    def __init__(self, channels: int, width: int, patch: int, eps: float):
        super().__init__()
        self.proj = nn.Conv2d(channels, width, patch, stride=patch)
        self.norm = nn.LayerNorm(width, eps)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.proj(x).flatten(2).transpose(1, 2))  # B N D


class PVT(Model):
    config: PVTConfig

    def __init__(self, config: PVTConfig):
        super().__init__()
        c = self.config = config
        rates = iter(torch.linspace(0, c.drop_path, sum(c.depths), device="cpu").tolist())
        last = len(c.widths) - 1
        for i, (width, (h, w)) in enumerate(zip(c.widths, c.grids, strict=True)):
            before, patch = (c.widths[i - 1], 2) if i else (c.channels, c.patch)
            patches = PatchEmbed(before, width, patch, c.eps)
            blocks = nn.ModuleList(PVTBlock(c, i, next(rates)) for _ in range(c.depths[i]))
            # The authors number the stages in parameter names.
            self.add_module(f"patch_embed{i + 1}", patches)
            self.register_parameter(f"pos_embed{i + 1}", nn.Parameter(torch.zeros(1, h * w + (i == last), width)))
            self.add_module(f"block{i + 1}", blocks)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, c.width))
        self.drop = Dropout(c.drop)
        self.norm = nn.LayerNorm(c.width, eps=1e-6)
        self.head = head_of(c.width, c.classes)
        self._entries = tuple(
            Stage(
                self,
                partial(self._enter, i),
                [self._stage(i)[0]],
                [f"pos_embed{i + 1}", *(["cls_token"] if i == last else [])],
            )
            for i in range(last + 1)
        )
        if not self.norm.weight.is_meta:
            self._initialise()

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.embed(images))  # B K

    def embed(self, images: Tensor) -> Tensor:
        """One feature vector per image, the class token's: (B, D)."""
        return self._tokens(images)[-1][:, 0]

    def features(self, images: Tensor, levels: bool = False) -> Any:
        """The last map, normalised, (B, D, h, w); with `levels`, of every stage, the earlier ones unnormalised."""
        *maps, last = self._tokens(images, levels)
        last = as_map(last[:, 1:], self.config.grid)
        return [*maps, last] if levels else last

    def _tokens(self, images: Tensor, levels: bool = False) -> list[Tensor]:
        """The normalised tokens of the last stage, (B, N, D); with `levels`, the maps of earlier stages before them."""
        check_images(images, self.config)
        x: Tensor = images
        maps: list[Tensor] = []
        for i, grid in enumerate(self.config.grids):
            if i:
                x = as_map(x, self.config.grids[i - 1])
                maps = [*maps, x] if levels else []
            x = self._entries[i](x)  # B N D
            for block in self._stage(i)[2]:
                x = block(x, grid)
        return [*maps, self.norm(x)]

    def _enter(self, i: int, x: Tensor) -> Tensor:
        """The tokens of stage `i`, from the image or the previous feature map."""
        patches, positions, _ = self._stage(i)
        x = patches(x)  # B N D
        if i == len(self.config.grids) - 1:
            x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        return self.drop(x + positions)

    def stages(self) -> list[nn.Module]:
        """The patch embedding and blocks of each stage, the final norm, the head."""
        found = [part for i, entry in enumerate(self._entries) for part in (entry, *self._stage(i)[2])]
        return [*found, self.norm, *([self.head] if self.config.classes else [])]

    @classmethod
    def resized_state(
        cls, state: Mapping[str, Tensor], old: PVTConfig, new: PVTConfig, method: Interpolation
    ) -> dict[str, Tensor]:
        """The position embeddings of each stage are resampled; the class token's is kept."""
        resampled = dict(state)
        for i, (before, after) in enumerate(zip(old.grids, new.grids, strict=True)):
            name = f"pos_embed{i + 1}"
            if before != after and name in state:
                rows = state[name][0]
                prefix = rows.shape[0] - before[0] * before[1]
                resampled[name] = torch.cat([rows[:prefix], resample(rows[prefix:], before, after, method)])[None]
        return resampled

    def attentions(self) -> list[AttentionLayer]:
        found = []
        for i, grid in enumerate(self.config.grids):
            blocks = [block for block in self._stage(i)[2] if isinstance(block, PVTBlock)]
            areas = blocks[0].attn.areas(grid)
            found += [AttentionLayer(block.attn, grid, self.config.patch * 2**i, areas) for block in blocks]
        return found

    def last_map(self) -> tuple[nn.Module, int]:
        """The keys of the class token's last attention."""
        block = self._stage(len(self.config.grids) - 1)[2][-1]
        assert isinstance(block, PVTBlock)
        return block.norm1, -1

    def position_embeddings(self) -> list[tuple[Tensor, Grid]]:
        return [(self._stage(i)[1], grid) for i, grid in enumerate(self.config.grids)]

    def _stage(self, i: int) -> tuple[nn.Module, nn.Parameter, nn.ModuleList]:
        blocks = cast(nn.ModuleList, self.get_submodule(f"block{i + 1}"))
        return self.get_submodule(f"patch_embed{i + 1}"), getattr(self, f"pos_embed{i + 1}"), blocks

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if "pos_embed" in name or name == "cls_token":
                nn.init.trunc_normal_(parameter, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
        for layer in self.classifiers():
            nn.init.zeros_(layer.weight)
