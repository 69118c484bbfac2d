"""Swin Transformer: "Hierarchical Vision Transformer using Shifted Windows", https://arxiv.org/abs/2103.14030.

Self-attention within windows of 7×7 tokens (`windows.py`), at a cost linear in the image size. Every other block shifts
the windows by half their size to connect neighbours. Between stages, 2×2 tokens merge into one of twice the width, as
in convolutional networks:

    Attention(Q, K, V) = softmax(Q·Kᵀ/√d + B)·V      B: relative position bias                (4)  `WindowAttention`
    z' = W-MSA(LN(z)) + z,   z = MLP(LN(z')) + z'    windows shifted in every other block      (3)  `SwinBlock`

Any image size works: images are padded to multiples of the patch, maps to multiples of the window and to even sides
before merging. Windows always have full size, so the weights fit every image size without resampling. A map no larger
than a window is one unshifted window; the authors' code would shrink the window instead.

Other differences from the paper: none. Initialisation follows the authors' code, with a zero head.

Legend: B batch, D width, H heads, K classes, (h, w) token map, W windows of n tokens each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import Ints
from vitrail.models.layers import Dropout, DropPath, Mlp, attend
from vitrail.models.model import AttentionLayer, Model, ModelConfig
from vitrail.models.position import Grid, offsets
from vitrail.models.validate import check_counts, check_heads, check_images, check_rates, check_stages
from vitrail.models.windows import Windows

APART = -100.0  # the authors' mask, added to the logits of pairs that must not attend


@dataclass(frozen=True)
class SwinConfig(ModelConfig):
    widths: Ints  # of the tokens of each stage
    depths: Ints  # blocks of each stage
    heads: Ints  # of each stage
    window: int = 7  # tokens per side
    patch: int = 4
    img_size: tuple[int, int] = (224, 224)
    channels: int = 3
    classes: int = 1000
    drop: float = 0.0
    drop_path: float = 0.0

    def __post_init__(self) -> None:
        check_counts(self, "widths", "depths", "heads", "window", "patch")
        check_stages(self, "depths", "heads")
        check_rates(self)
        check_heads(self.widths, self.heads)

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


_T, _S, _B, _L = (
    ((96, 192, 384, 768), (2, 2, 6, 2), (3, 6, 12, 24)),
    ((96, 192, 384, 768), (2, 2, 18, 2), (3, 6, 12, 24)),
    ((128, 256, 512, 1024), (2, 2, 18, 2), (4, 8, 16, 32)),
    ((192, 384, 768, 1536), (2, 2, 18, 2), (6, 12, 24, 48)),
)
# The paper's models, those for 384 pixels with windows of 12×12, and our own nano for images of 28 to 64 pixels.
CONFIGS = {
    "swin_nano": SwinConfig((48, 96, 192), (2, 4, 1), (3, 6, 12), window=4, patch=2, img_size=(32, 32)),
    "swin_t": SwinConfig(*_T),
    "swin_s": SwinConfig(*_S),
    "swin_b": SwinConfig(*_B),
    "swin_b_w12": SwinConfig(*_B, window=12, img_size=(384, 384)),
    "swin_l": SwinConfig(*_L),
    "swin_l_w12": SwinConfig(*_L, window=12, img_size=(384, 384)),
}


class WindowAttention(nn.Module):
    """Multi-head self-attention within the windows of a map, shifted or not."""

    def __init__(self, width: int, heads: int, grid: Grid, window: int, shifted: bool, drop: float):
        super().__init__()
        self.heads, self.windows = heads, Windows(grid, window, shifted)
        self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * window - 1) ** 2, heads))
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.drop = Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        """Attends within the windows of a map: (B, h, w, D) → (B, h, w, D)."""
        q, k, v = self._split(x)
        bias = self._bias(q).expand(q.shape[1], -1, -1, -1)
        # Windows and heads share one dimension: fused kernels and ONNX need four-dimensional attention.
        q4, k4, v4, bias = q.flatten(1, 2), k.flatten(1, 2), v.flatten(1, 2), bias.flatten(0, 1)
        y = attend(q4, k4, v4, bias).reshape(q.shape)  # B W H n D/H
        y = self.proj(y.transpose(2, 3).flatten(3))  # B W n D
        return self.drop(self.windows.join(y))

    def weights(self, x: Tensor) -> Tensor:
        """The attention weights of every window that `forward` applies, in row-major order: (B, W, H, n, n)."""
        q, k, _ = self._split(x)
        return (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5 + self._bias(q)).softmax(dim=-1)

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        windows = self.windows.cut(x)  # B W n D
        q, k, v = self.qkv(windows).unflatten(3, (3, self.heads, -1)).unbind(3)  # B W n H D/H
        return q.transpose(2, 3), k.transpose(2, 3), v.transpose(2, 3)

    def _bias(self, like: Tensor) -> Tensor:
        """The bias, and mask, of the logits: (H, n, n), or (W, H, n, n) for shifted windows."""
        side = self.windows.side
        rows = offsets((side, side), like.device)
        bias = self.relative_position_bias_table[rows].permute(2, 0, 1).to(like.dtype)
        apart = self.windows.apart(like.device)
        return bias if apart is None else bias + apart[:, None].to(like.dtype) * APART


class SwinBlock(nn.Module):
    """One pre-norm block with window attention: equation 3."""

    def __init__(self, width: int, heads: int, grid: Grid, window: int, shifted: bool, drop: float, drop_path: float):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = WindowAttention(width, heads, grid, window, shifted, drop)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Mlp(width, 4 * width, drop)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.attn(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class PatchEmbed(nn.Module):
    """Splits the padded image into patches; projects and normalises each one."""

    def __init__(self, channels: int, width: int, patch: int):
        super().__init__()
        self.patch = patch
        self.proj = nn.Conv2d(channels, width, patch, stride=patch)
        self.norm = nn.LayerNorm(width)

    def forward(self, images: Tensor) -> Tensor:
        h, w = images.shape[2:]
        x = self.proj(F.pad(images, (0, -w % self.patch, 0, -h % self.patch)))
        return self.norm(x.permute(0, 2, 3, 1))  # B h w D


class PatchMerging(nn.Module):
    """Merges 2×2 tokens into one."""

    def __init__(self, width: int, out: int):
        super().__init__()
        self.norm = nn.LayerNorm(4 * width)
        self.reduction = nn.Linear(4 * width, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h, w = x.shape[1:3]
        x = F.pad(x, (0, 0, 0, w % 2, 0, h % 2))
        x = x.reshape(-1, (h + 1) // 2, 2, (w + 1) // 2, 2, x.shape[3]).permute(0, 1, 3, 4, 2, 5).flatten(3)
        return self.reduction(self.norm(x))


class Layer(nn.Module):
    """The blocks of one stage, preceded by patch merging."""

    def __init__(self, c: SwinConfig, i: int, rates: list[float]):
        super().__init__()
        self.downsample = PatchMerging(c.widths[i - 1], c.widths[i]) if i else None
        self.blocks = nn.ModuleList(
            SwinBlock(c.widths[i], c.heads[i], c.grids[i], c.window, j % 2 == 1, c.drop, rate)
            for j, rate in enumerate(rates)
        )

    def parts(self) -> list[nn.Module]:
        """The modules in the order they are called."""
        return [*self.blocks] if self.downsample is None else [self.downsample, *self.blocks]


class Head(nn.Module):
    def __init__(self, width: int, classes: int):
        super().__init__()
        self.fc = nn.Linear(width, classes)

    def forward(self, features: Tensor) -> Tensor:
        return self.fc(features)


class Swin(Model):
    config: SwinConfig

    def __init__(self, config: SwinConfig):
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
            for attention in (block.attn for block in layer.blocks if isinstance(block, SwinBlock)):
                windows, pixels = attention.windows, self.config.patch * 2**i
                shift = (windows.shift[0], windows.shift[1])
                found.append(AttentionLayer(attention, windows.grid, pixels, window=windows.side, shift=shift))
        return found

    def last_map(self) -> tuple[nn.Module, int]:
        return self.norm, -1

    def bias_tables(self) -> dict[int, list[tuple[Tensor, Grid]]]:
        window = (self.config.window, self.config.window)
        return {
            number: [
                (block.attn.relative_position_bias_table, window)
                for block in layer.blocks
                if isinstance(block, SwinBlock)
            ]
            for number, layer in enumerate(self._layers(), start=1)
        }

    def _layers(self) -> list[Layer]:
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, WindowAttention):
                nn.init.trunc_normal_(module.relative_position_bias_table, std=0.02)
        for layer in self.classifiers():
            nn.init.zeros_(layer.weight)
