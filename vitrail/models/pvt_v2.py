"""PVT v2: "Improved Baselines with Pyramid Vision Transformer", https://arxiv.org/abs/2106.13797.

PVT with three changes. Patch embeddings overlap: a convolution of about twice its stride, zero-padded. Each MLP
contains a depth-wise 3×3 convolution, whose zero padding encodes positions: there are no position embeddings, and any
image size works. `linear` attention average-pools keys and values to 7×7:

    z' = SRA(LN(z)) + z,   z = W2·gelu(DWConv(W1·LN(z'))) + z'          `PVTv2Block`

There is no class token: the last feature map is average-pooled.

Differences from the paper: none. Initialisation follows the authors' code, with a zero head.

Legend: B batch, N tokens, D width, K classes, (h, w) token map.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import Ints
from vitrail.models.layers import Dropout, DropPath, Stage, as_map, head_of
from vitrail.models.model import AttentionLayer, Model, ModelConfig
from vitrail.models.position import Grid
from vitrail.models.pvt import ReducedAttention, check_reductions
from vitrail.models.validate import check_counts, check_heads, check_images, check_rates, check_stages


@dataclass(frozen=True)
class PVTv2Config(ModelConfig):
    widths: Ints  # of the tokens of each stage
    depths: Ints  # blocks of each stage
    heads: Ints  # of each stage
    ratios: Ints  # hidden units of the MLPs, as multiples of the width
    reductions: Ints  # of each stage: R×R tokens become one key
    linear: bool = False  # pool keys to 7×7 instead
    patch: int = 4  # stride of the first patch embedding; the others have 2
    img_size: tuple[int, int] = (224, 224)
    channels: int = 3
    classes: int = 1000
    drop: float = 0.0
    drop_path: float = 0.0
    eps: float = 1e-5  # of the norms of patches and keys; transformers uses 1e-6 there too

    def __post_init__(self) -> None:
        check_counts(self, "widths", "depths", "heads", "ratios", "reductions", "patch")
        check_stages(self, "depths", "heads", "ratios", "reductions")
        check_rates(self)
        check_heads(self.widths, self.heads)
        if not self.linear:
            check_reductions(self.grids, self.reductions)

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
        """Rows and columns of the token map of each stage; padded convolutions round up."""
        strides = [self.patch * 2**i for i in range(len(self.widths))]
        return [(-(-self.img_size[0] // stride), -(-self.img_size[1] // stride)) for stride in strides]

    @property
    def grid(self) -> Grid:
        """Rows and columns of the last feature map."""
        return self.grids[-1]


def _pvt(*depths: int, narrow: bool = False, ratio: int = 8, linear: bool = False) -> PVTv2Config:
    widths = (32, 64, 160, 256) if narrow else (64, 128, 320, 512)
    return PVTv2Config(widths, depths, (1, 2, 5, 8), (ratio, ratio, 4, 4), (8, 4, 2, 1), linear)


# Table 1 of the paper, and our own nano for images of 28 to 64 pixels.
CONFIGS = {
    "pvt_v2_nano": PVTv2Config((48, 96, 192), (2, 2, 1), (3, 6, 12), (4, 4, 4), (4, 2, 1), patch=2, img_size=(32, 32)),
    "pvt_v2_b0": _pvt(2, 2, 2, 2, narrow=True),
    "pvt_v2_b1": _pvt(2, 2, 2, 2),
    "pvt_v2_b2": _pvt(3, 4, 6, 3),
    "pvt_v2_b2_li": _pvt(3, 4, 6, 3, linear=True),
    "pvt_v2_b3": _pvt(3, 4, 18, 3),
    "pvt_v2_b4": _pvt(3, 8, 27, 3),
    "pvt_v2_b5": _pvt(3, 6, 40, 3, ratio=4),
}


class ConvMlp(nn.Module):
    """An MLP with a depth-wise convolution; for `linear` attention, with a ReLU before it."""

    def __init__(self, width: int, hidden: int, drop: float, linear: bool):
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.dwconv = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)
        self.fc2 = nn.Linear(hidden, width)
        self.drop = Dropout(drop)
        self.linear = linear

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        x = self.fc1(x).transpose(1, 2).unflatten(2, grid)  # B D h w
        x = self.dwconv(F.relu(x) if self.linear else x).flatten(2).transpose(1, 2)
        return self.drop(self.fc2(self.drop(F.gelu(x))))


class PVTv2Block(nn.Module):
    """One pre-norm encoder block with reduced attention and a convolutional MLP."""

    def __init__(self, c: PVTv2Config, i: int, drop_path: float):
        super().__init__()
        width = c.widths[i]
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = ReducedAttention(width, c.heads[i], c.reductions[i], c.drop, c.linear, c.eps)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = ConvMlp(width, c.ratios[i] * width, c.drop, c.linear)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        x = x + self.drop_path(self.attn(self.norm1(x), grid))
        return x + self.drop_path(self.mlp(self.norm2(x), grid))


class OverlapPatchEmbed(nn.Module):
    """A convolution of about twice its stride, and a norm."""

    def __init__(self, channels: int, width: int, stride: int, eps: float):
        super().__init__()
        size = 2 * stride - 1
        self.proj = nn.Conv2d(channels, width, size, stride, size // 2)
        self.norm = nn.LayerNorm(width, eps)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.proj(x).flatten(2).transpose(1, 2))  # B N D


class Layer(nn.Module):
    """One stage: patch embedding, blocks, norm."""

    def __init__(self, c: PVTv2Config, i: int, rates: list[float]):
        super().__init__()
        self.grid = c.grids[i]
        self.downsample = OverlapPatchEmbed(c.widths[i - 1], c.widths[i], 2, c.eps) if i else None
        self.blocks = nn.ModuleList(PVTv2Block(c, i, rate) for rate in rates)
        self.norm = nn.LayerNorm(c.widths[i], eps=1e-6)

    def map(self, x: Tensor) -> Tensor:
        """The blocks' output after the norm, as a feature map: (B, D, h, w)."""
        return as_map(self.norm(x), self.grid)


class PVTv2(Model):
    config: PVTv2Config

    def __init__(self, config: PVTv2Config):
        super().__init__()
        c = self.config = config
        self.patch_embed = OverlapPatchEmbed(c.channels, c.widths[0], c.patch, c.eps)
        rates = torch.linspace(0, c.drop_path, sum(c.depths), device="cpu").tolist()
        ends = [sum(c.depths[: i + 1]) for i in range(len(c.depths))]
        self.layers = nn.ModuleList(Layer(c, i, rates[end - c.depths[i] : end]) for i, end in enumerate(ends))
        self.head = head_of(c.width, c.classes)
        layers = self._layers()
        self._merges = tuple(
            Stage(self, partial(self._merge, i), [layers[i].norm, layers[i + 1].downsample])
            for i in range(len(layers) - 1)
        )
        if not self.patch_embed.norm.weight.is_meta:
            self._initialise()

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.embed(images))  # B K

    def embed(self, images: Tensor) -> Tensor:
        """One feature vector per image, the average-pooled last feature map: (B, D)."""
        return self.features(images).mean(dim=(2, 3))

    def features(self, images: Tensor, levels: bool = False) -> Any:
        """The last feature map, (B, D, h, w); with `levels`, of every stage, each after its norm."""
        check_images(images, self.config)
        x = self.patch_embed(images)
        maps: list[Tensor] = []
        layers = self._layers()
        for i, layer in enumerate(layers):
            if i:
                x, before = self._merges[i - 1](x)
                maps = [*maps, before] if levels else []
            for block in layer.blocks:
                x = block(x, layer.grid)  # B N D
        last = layers[-1].map(x)
        return [*maps, last] if levels else last

    def _merge(self, i: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens of the stage after `i`, and the feature map of stage `i` they are made from."""
        layer, after = self._layers()[i : i + 2]
        assert after.downsample is not None
        picture = layer.map(x)
        return after.downsample(picture), picture

    def stages(self) -> list[nn.Module]:
        """The patch embedding and blocks of each stage, the final norm, the head."""
        layers = self._layers()
        entries = (self.patch_embed, *self._merges)
        found = [part for entry, layer in zip(entries, layers, strict=True) for part in (entry, *layer.blocks)]
        return [*found, layers[-1].norm, *([self.head] if self.config.classes else [])]

    def attentions(self) -> list[AttentionLayer]:
        found = []
        for i, layer in enumerate(self._layers()):
            blocks = [block for block in layer.blocks if isinstance(block, PVTv2Block)]
            areas = blocks[0].attn.areas(layer.grid)
            found += [AttentionLayer(block.attn, layer.grid, self.config.patch * 2**i, areas) for block in blocks]
        return found

    def last_map(self) -> tuple[nn.Module, int]:
        return self._layers()[-1].norm, -1

    def _layers(self) -> list[Layer]:
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Conv2d):
                fan_out = module.kernel_size[0] * module.kernel_size[1] * module.out_channels // module.groups
                nn.init.normal_(module.weight, std=(2 / fan_out) ** 0.5)
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]  # all of them have one
        for layer in self.classifiers():
            nn.init.zeros_(layer.weight)
