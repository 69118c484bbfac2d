"""Swin Transformer V2: "Scaling Up Capacity and Resolution", https://arxiv.org/abs/2111.09883.

A Swin, https://arxiv.org/abs/2103.14030, that trains at larger sizes and moves between window sizes:

    z' = z + LN(W-MSA(z)),   z = z' + LN(MLP(z'))         norms after the branches               `SwinV2Block`
    A = softmax(cos(Q, K)·τ + B)                          cosine attention, τ ≤ 100 per head     `CosineAttention`
    B(Δy, Δx) = 16·sigmoid(MLP(Δ'y, Δ'x)),                continuous position bias,              `PositionBias`
    Δ' = sign(Δ)·log2(1 + 8·|Δ| / (n - 1)) / 3            in log-spaced coordinates

Here n is the side of the windows in pre-training. No tensor has a shape that depends on the window, so any weights run
with any window: set `window`, and `pretrained` to the windows of the stages in pre-training, such as (12, 12, 12, 6).

Any image size works, as in Swin. A window is no larger than the map: its side is at most the map's shorter side.

Other differences from the paper: none. Initialisation follows the authors' code (the norms of the branches start at
zero), with a zero head.

Legend: B batch, D width, H heads, K classes, (h, w) token map, W windows of n tokens each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import Ints
from vitrail.errors import UserError
from vitrail.models.layers import Dropout, DropPath, Mlp, attend
from vitrail.models.model import AttentionLayer, Model, ModelConfig
from vitrail.models.position import Grid, offsets
from vitrail.models.swin import APART, Head, PatchEmbed
from vitrail.models.validate import check_counts, check_heads, check_images, check_rates, check_stages
from vitrail.models.windows import Windows

_MOST = math.log(100)  # of the logarithm of τ


@dataclass(frozen=True)
class SwinV2Config(ModelConfig):
    widths: Ints  # of the tokens of each stage
    depths: Ints  # blocks of each stage
    heads: Ints  # of each stage
    window: int = 8  # tokens per side
    pretrained: Ints = ()  # the windows of each stage in pre-training, if they were others
    patch: int = 4
    img_size: tuple[int, int] = (256, 256)
    channels: int = 3
    classes: int = 1000
    drop: float = 0.0
    drop_path: float = 0.0

    def __post_init__(self) -> None:
        check_counts(self, "widths", "depths", "heads", "window", "patch")
        check_stages(self, "depths", "heads", *(["pretrained"] if self.pretrained else []))
        check_rates(self)
        check_heads(self.widths, self.heads)
        if self.pretrained and min(self.pretrained) < 1:
            raise UserError(f"'pretrained' must be at least 1, but it is {self.pretrained}.")

    @property
    def width(self) -> int:
        """The width of the last stage."""
        return self.widths[-1]

    @property
    def stride(self) -> int:
        """Pixels per token of the last stage."""
        return self.patch * 2 ** (len(self.widths) - 1)

    @property
    def grids(self) -> list[Grid]:
        """Rows and columns of the token map of each stage; padding rounds up."""
        h, w = (-(-side // self.patch) for side in self.img_size)
        return [(-(-h // 2**i), -(-w // 2**i)) for i in range(len(self.widths))]

    @property
    def grid(self) -> Grid:
        """Rows and columns of the last feature map."""
        return self.grids[-1]

    @property
    def windows(self) -> list[int]:
        """The side of the windows of each stage."""
        return [min(self.window, *grid) for grid in self.grids]


_T, _S, _B, _L = (
    ((96, 192, 384, 768), (2, 2, 6, 2), (3, 6, 12, 24)),
    ((96, 192, 384, 768), (2, 2, 18, 2), (3, 6, 12, 24)),
    ((128, 256, 512, 1024), (2, 2, 18, 2), (4, 8, 16, 32)),
    ((192, 384, 768, 1536), (2, 2, 18, 2), (6, 12, 24, 48)),
)
_SMALL, _LARGE = (192, 192), (384, 384)
_AT_192 = (12, 12, 12, 6)
# The paper's models, by the windows they have and, before "to", were pre-trained with; and our own nano for images of
# 28 to 64 pixels.
CONFIGS = {
    "swin_v2_nano": SwinV2Config((48, 96, 192), (2, 4, 1), (3, 6, 12), window=4, patch=2, img_size=(32, 32)),
    "swin_v2_t": SwinV2Config(*_T),
    "swin_v2_t_w16": SwinV2Config(*_T, window=16),
    "swin_v2_s": SwinV2Config(*_S),
    "swin_v2_s_w16": SwinV2Config(*_S, window=16),
    "swin_v2_b": SwinV2Config(*_B),
    "swin_v2_b_w12": SwinV2Config(*_B, window=12, img_size=_SMALL),
    "swin_v2_b_w16": SwinV2Config(*_B, window=16),
    "swin_v2_b_w12to16": SwinV2Config(*_B, window=16, pretrained=_AT_192),
    "swin_v2_b_w12to24": SwinV2Config(*_B, window=24, pretrained=_AT_192, img_size=_LARGE),
    "swin_v2_l": SwinV2Config(*_L, window=12, img_size=_SMALL),
    "swin_v2_l_w12to16": SwinV2Config(*_L, window=16, pretrained=_AT_192),
    "swin_v2_l_w12to24": SwinV2Config(*_L, window=24, pretrained=_AT_192, img_size=_LARGE),
}


class PositionBias(nn.Sequential):
    """The bias of each offset between two tokens, from an MLP of its log-spaced coordinates."""

    def __init__(self, heads: int, side: int, pretrained: int):
        super().__init__(nn.Linear(2, 512), nn.ReLU(), nn.Linear(512, heads, bias=False))
        self.side, self.pretrained = side, pretrained

    def table(self) -> Tensor:
        """The bias of every offset in a window, in row-major order: ((2n - 1)², H)."""
        first = self[0]
        assert isinstance(first, nn.Linear)
        steps = torch.arange(1 - self.side, self.side, device=first.weight.device, dtype=torch.float32)
        scaled = 8 * steps / max(self.pretrained - 1, 1)
        places = (scaled.sign() * (1 + scaled.abs()).log2() / 3).to(first.weight.dtype)
        y, x = torch.meshgrid(places, places, indexing="ij")
        return 16 * torch.sigmoid(self(torch.stack([y.flatten(), x.flatten()], dim=1)))


class CosineAttention(nn.Module):
    """Multi-head cosine self-attention within the windows of a map, shifted or not."""

    def __init__(self, width: int, heads: int, windows: Windows, pretrained: int, drop: float):
        super().__init__()
        self.heads, self.windows = heads, windows
        self.logit_scale = nn.Parameter(torch.full((heads, 1, 1), math.log(10)))
        self.cpb_mlp = PositionBias(heads, windows.side, pretrained)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(width))  # keys have none
        self.v_bias = nn.Parameter(torch.zeros(width))
        self.proj = nn.Linear(width, width)
        self.drop = Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        """Attends within the windows of a map: (B, h, w, D) → (B, h, w, D)."""
        q, k, v = self._split(x)
        bias = self._bias(q).expand(q.shape[1], -1, -1, -1)
        # Windows and heads share one dimension: fused kernels and ONNX need four-dimensional attention. They divide by
        # the root of the width, so that is undone.
        q4 = (q * q.shape[-1] ** 0.5).flatten(1, 2)
        y = attend(q4, k.flatten(1, 2), v.flatten(1, 2), bias.flatten(0, 1)).reshape(q.shape)  # B W H n D/H
        y = self.proj(y.transpose(2, 3).flatten(3))  # B W n D
        return self.drop(self.windows.join(y))

    def weights(self, x: Tensor) -> Tensor:
        """The attention weights of every window that `forward` applies, in row-major order: (B, W, H, n, n)."""
        q, k, _ = self._split(x)
        return (q @ k.transpose(-2, -1) + self._bias(q)).softmax(dim=-1)

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of length τ, keys of length 1, and values: (B, W, H, n, D/H)."""
        bias = torch.cat([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias])
        joined = self.qkv(self.windows.cut(x)) + bias
        q, k, v = joined.unflatten(3, (3, self.heads, -1)).transpose(2, 4).unbind(3)  # B W H n D/H
        scale = self.logit_scale.clamp(max=_MOST).exp()
        return F.normalize(q, dim=-1) * scale, F.normalize(k, dim=-1), v

    def _bias(self, like: Tensor) -> Tensor:
        """The bias, and mask, of the logits: (H, n, n), or (W, H, n, n) for shifted windows."""
        side = self.windows.side
        bias = self.cpb_mlp.table()[offsets((side, side), like.device)].permute(2, 0, 1).to(like.dtype)
        apart = self.windows.apart(like.device)
        return bias if apart is None else bias + apart[:, None].to(like.dtype) * APART


class SwinV2Block(nn.Module):
    """One block with window attention, its norms after the branches."""

    def __init__(self, width: int, heads: int, windows: Windows, pretrained: int, drop: float, drop_path: float):
        super().__init__()
        self.attn = CosineAttention(width, heads, windows, pretrained, drop)
        self.norm1 = nn.LayerNorm(width)
        self.mlp = Mlp(width, 4 * width, drop)
        self.norm2 = nn.LayerNorm(width)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.norm1(self.attn(x)))
        return x + self.drop_path(self.norm2(self.mlp(x)))


class PatchMerging(nn.Module):
    """Merges 2×2 tokens into one, and normalises it."""

    def __init__(self, width: int, out: int):
        super().__init__()
        self.reduction = nn.Linear(4 * width, out, bias=False)
        self.norm = nn.LayerNorm(out)

    def forward(self, x: Tensor) -> Tensor:
        h, w = x.shape[1:3]
        x = F.pad(x, (0, 0, 0, w % 2, 0, h % 2))
        x = x.reshape(-1, (h + 1) // 2, 2, (w + 1) // 2, 2, x.shape[3]).permute(0, 1, 3, 4, 2, 5).flatten(3)
        return self.norm(self.reduction(x))


class Layer(nn.Module):
    """The blocks of one stage, preceded by patch merging."""

    def __init__(self, c: SwinV2Config, i: int, rates: list[float]):
        super().__init__()
        side = c.windows[i]
        self.downsample = PatchMerging(c.widths[i - 1], c.widths[i]) if i else None
        self.blocks = nn.ModuleList(
            SwinV2Block(
                c.widths[i],
                c.heads[i],
                Windows(c.grids[i], side, shifted=j % 2 == 1),
                c.pretrained[i] if c.pretrained else side,
                c.drop,
                rate,
            )
            for j, rate in enumerate(rates)
        )

    def parts(self) -> list[nn.Module]:
        """The modules in the order they are called."""
        return [*self.blocks] if self.downsample is None else [self.downsample, *self.blocks]

    def attentions(self) -> list[CosineAttention]:
        """The attention of each block."""
        return [block.attn for block in self.blocks if isinstance(block, SwinV2Block)]


class SwinV2(Model):
    config: SwinV2Config

    def __init__(self, config: SwinV2Config):
        super().__init__()
        c = self.config = config
        self.patch_embed = PatchEmbed(c.channels, c.widths[0], c.patch)
        self.drop = Dropout(c.drop)
        rates = torch.linspace(0, c.drop_path, sum(c.depths), device="cpu").tolist()
        ends = [sum(c.depths[: i + 1]) for i in range(len(c.depths))]
        layers = [Layer(c, i, rates[end - c.depths[i] : end]) for i, end in enumerate(ends)]
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(c.width)
        self.head = Head(c.width, c.classes) if c.classes else nn.Identity()
        if not self.norm.weight.is_meta:
            self._initialise()

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.embed(images))  # B K

    def embed(self, images: Tensor) -> Tensor:
        """One feature vector per image, the average-pooled last feature map: (B, D)."""
        return self._maps(images)[-1].mean(dim=(1, 2))

    def features(self, images: Tensor, levels: bool = False) -> Any:
        """The last map, normalised, (B, D, h, w); with `levels`, of every stage, the earlier ones unnormalised."""
        maps = [x.permute(0, 3, 1, 2) for x in self._maps(images, levels)]
        return maps if levels else maps[-1]

    def _maps(self, images: Tensor, levels: bool = False) -> list[Tensor]:
        """The last feature map, normalised, (B, h, w, D); with `levels`, preceded by those of the earlier stages."""
        check_images(images, self.config)
        x = self.drop(self.patch_embed(images))
        maps: list[Tensor] = []
        for i, layer in enumerate(self._layers()):
            maps = [*maps, x] if levels and i else []
            for part in layer.parts():
                x = part(x)  # B h w D
        return [*maps, self.norm(x)]

    def stages(self) -> list[nn.Module]:
        """The patch embedding, each block and merging, the final norm, the head."""
        parts = [part for layer in self._layers() for part in layer.parts()]
        return [self.patch_embed, *parts, self.norm, *([self.head] if self.config.classes else [])]

    def attentions(self) -> list[AttentionLayer]:
        found = []
        for i, layer in enumerate(self._layers()):
            for attention in layer.attentions():
                windows, pixels = attention.windows, self.config.patch * 2**i
                shift = (windows.shift[0], windows.shift[1])
                found.append(AttentionLayer(attention, windows.grid, pixels, window=windows.side, shift=shift))
        return found

    def last_map(self) -> tuple[nn.Module, int]:
        return self.norm, -1

    def bias_tables(self) -> dict[int, list[tuple[Tensor, Grid]]]:
        sides = self.config.windows
        return {
            number: [(attention.cpb_mlp.table(), (side, side)) for attention in layer.attentions()]
            for number, (side, layer) in enumerate(zip(sides, self._layers(), strict=True), start=1)
        }

    def _layers(self) -> list[Layer]:
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, SwinV2Block):
                nn.init.zeros_(module.norm1.weight)
                nn.init.zeros_(module.norm2.weight)
        for layer in self.classifiers():
            nn.init.zeros_(layer.weight)
