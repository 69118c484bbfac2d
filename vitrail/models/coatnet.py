"""CoAtNet: "Marrying Convolution and Attention for All Data Sizes", https://arxiv.org/abs/2106.04803.

Convolution at high resolution, attention at low: a stem, two stages of inverted bottlenecks (MBConv), then two of
transformer blocks whose attention has a learned bias for every relative offset, as a convolution has a weight:

    y_i = Σ_j softmax_j(x_i·x_j + w_(i-j)) x_j                          (5)  `RelativeAttention`

Every stage downsamples by 2: the shortcut by average pooling and a projection, the branch by a strided depth-wise
convolution in MBConv, and by average pooling before attention.

The authors published no code. The details are those of timm, after MaxViT, by the same authors: BatchNorm and GELU in
MBConv, squeeze-and-excitation at a quarter of the output width, 32 channels per head, a tanh hidden layer before the
classifier. The stem of `coatnet_nano` does not downsample. Attention is initialised as in a ViT, convolutions as in
EfficientNet, the head with zeros.

Legend: B batch, D width, H heads, K classes, (h, w) feature map, N its positions.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import Ints
from vitrail.errors import UserError
from vitrail.models.layers import Dropout, DropPath, Stage, attend
from vitrail.models.model import AttentionLayer, Model, ModelConfig
from vitrail.models.norm import BatchNorm2d
from vitrail.models.position import Grid, Interpolation, offsets, resample_offsets
from vitrail.models.validate import check_counts, check_images, check_rates, check_stages

_HEAD = 32  # channels per attention head


@dataclass(frozen=True)
class CoAtNetConfig(ModelConfig):
    widths: Ints  # output channels of each stage
    depths: Ints  # blocks of each stage
    first: int = 64  # width of the stem
    convs: int = 2  # number of MBConv stages; the later ones are transformer stages
    shrink: bool = True  # whether the stem downsamples by 2
    img_size: tuple[int, int] = (224, 224)
    channels: int = 3
    classes: int = 1000
    drop: float = 0.0
    drop_path: float = 0.0

    def __post_init__(self) -> None:
        check_counts(self, "widths", "depths", "first")
        check_stages(self, "depths")
        check_rates(self)
        if not 0 <= self.convs <= len(self.widths):
            raise UserError(f"'convs' must be from 0 to the {len(self.widths)} stages, but it is {self.convs}.")
        for width in self.widths[self.convs :]:
            if width % _HEAD:
                raise UserError(f"The widths of attention stages must be multiples of {_HEAD}, but one is {width}.")

    @property
    def width(self) -> int:
        """The width of the last feature map."""
        return self.widths[-1]

    @property
    def strides(self) -> list[int]:
        """Pixels per position of the feature map of each stage."""
        return [2 ** (i + 1 + self.shrink) for i in range(len(self.widths))]

    @property
    def stride(self) -> int:
        """Pixels per position of the last feature map."""
        return self.strides[-1]

    @property
    def grids(self) -> list[Grid]:
        """Rows and columns of the feature map of each stage; every downsampling rounds up."""
        return [(-(-self.img_size[0] // stride), -(-self.img_size[1] // stride)) for stride in self.strides]

    @property
    def grid(self) -> Grid:
        """Rows and columns of the last feature map."""
        return self.grids[-1]


# Table 4 of the paper, and our own nano for images of 28 to 64 pixels.
CONFIGS = {
    "coatnet_nano": CoAtNetConfig((48, 96, 160), (2, 3, 2), 32, convs=1, shrink=False, img_size=(32, 32)),
    "coatnet_0": CoAtNetConfig((96, 192, 384, 768), (2, 3, 5, 2), 64),
    "coatnet_1": CoAtNetConfig((96, 192, 384, 768), (2, 6, 14, 2), 64),
    "coatnet_2": CoAtNetConfig((128, 256, 512, 1024), (2, 6, 14, 2), 128),
    "coatnet_3": CoAtNetConfig((192, 384, 768, 1536), (2, 6, 14, 2), 192),
    "coatnet_4": CoAtNetConfig((192, 384, 768, 1536), (2, 12, 28, 2), 192),
    "coatnet_5": CoAtNetConfig((256, 512, 1280, 2048), (2, 12, 28, 2), 192),
}


class Halve(nn.Module):
    """Average pooling of 2×2, and a 1×1 projection if the width changes."""

    def __init__(self, channels: int, out: int):
        super().__init__()
        self.expand = nn.Conv2d(channels, out, 1) if channels != out else None

    def forward(self, x: Tensor) -> Tensor:
        x = F.avg_pool2d(x, 2, ceil_mode=True, count_include_pad=False)
        return x if self.expand is None else self.expand(x)


class LayerNorm2d(nn.LayerNorm):
    """LayerNorm over the channels of a feature map, (B, D, h, w)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class BatchNormAct(BatchNorm2d):
    """BatchNorm, then GELU."""

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(super().forward(x))


class SqueezeExcite(nn.Module):
    """Squeeze-and-excitation (https://arxiv.org/abs/1709.01507): channels gated by their global averages."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.fc1 = nn.Conv2d(width, hidden, 1)
        self.fc2 = nn.Conv2d(hidden, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        average = x.mean(dim=(2, 3), keepdim=True)
        return x * torch.sigmoid(self.fc2(F.silu(self.fc1(average))))


class MBConv(nn.Module):
    """An inverted bottleneck (https://arxiv.org/abs/1801.04381): 1×1 expansion, depth-wise 3×3, 1×1 projection."""

    def __init__(self, channels: int, out: int, stride: int, drop_path: float):
        super().__init__()
        inner = 4 * out
        self.shortcut = Halve(channels, out) if stride == 2 else nn.Identity()
        self.pre_norm = BatchNorm2d(channels)
        self.conv1_1x1 = nn.Conv2d(channels, inner, 1, bias=False)
        self.norm1 = BatchNormAct(inner)
        self.conv2_kxk = nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False)
        self.norm2 = BatchNormAct(inner)
        self.se = SqueezeExcite(inner, out // 4)
        self.conv3_1x1 = nn.Conv2d(inner, out, 1)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(self.conv1_1x1(self.pre_norm(x)))
        y = self.se(self.norm2(self.conv2_kxk(y)))
        return self.shortcut(x) + self.drop_path(self.conv3_1x1(y))


class RelPos(nn.Module):
    """The relative position bias of every head."""

    def __init__(self, grid: Grid, heads: int):
        super().__init__()
        self.grid = grid
        rows = (2 * grid[0] - 1) * (2 * grid[1] - 1)
        self.relative_position_bias_table = nn.Parameter(torch.zeros(rows, heads))

    def forward(self) -> Tensor:
        table = self.relative_position_bias_table
        return table[offsets(self.grid, table.device)].permute(2, 0, 1)  # H N N


class RelativeAttention(nn.Module):
    """Multi-head self-attention over a feature map, with relative position bias: equation 5."""

    def __init__(self, channels: int, out: int, grid: Grid, drop: float):
        super().__init__()
        self.heads = out // _HEAD
        self.qkv = nn.Conv2d(channels, 3 * out, 1)
        self.rel_pos = RelPos(grid, self.heads)
        self.proj = nn.Conv2d(out, out, 1)
        self.drop = Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self._split(x)
        y = attend(q, k, v, self.rel_pos().to(q.dtype))
        y = y.transpose(2, 3).reshape(x.shape[0], self.heads * _HEAD, *x.shape[2:])  # B D h w
        return self.drop(self.proj(y))

    def weights(self, x: Tensor) -> Tensor:
        """The attention weights that `forward` applies to the same input: (B, H, N, N)."""
        q, k, _ = self._split(x)
        return (q @ k.transpose(-2, -1) * _HEAD**-0.5 + self.rel_pos().to(q.dtype)).softmax(dim=-1)

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x).flatten(2).unflatten(1, (self.heads, 3, _HEAD)).unbind(2)  # B H D/H N
        return q.transpose(2, 3), k.transpose(2, 3), v.transpose(2, 3)


class Mlp2d(nn.Module):
    """An MLP at each position of a feature map."""

    def __init__(self, width: int, drop: float):
        super().__init__()
        self.fc1 = nn.Conv2d(width, 4 * width, 1)
        self.fc2 = nn.Conv2d(4 * width, width, 1)
        self.drop = Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.fc2(self.drop(F.gelu(self.fc1(x)))))


class CoAtBlock(nn.Module):
    """One pre-norm transformer block on a feature map; with a stride of 2, it downsamples first."""

    def __init__(self, channels: int, out: int, stride: int, grid: Grid, drop: float, drop_path: float):
        super().__init__()
        norm = LayerNorm2d(channels, eps=1e-6)
        halves = stride == 2
        self.shortcut = Halve(channels, out) if halves else nn.Identity()
        self.norm1 = nn.Sequential(OrderedDict(norm=norm, down=Halve(channels, channels))) if halves else norm
        self.attn = RelativeAttention(channels, out, grid, drop)
        self.norm2 = LayerNorm2d(out, eps=1e-6)
        self.mlp = Mlp2d(out, drop)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shortcut(x) + self.drop_path(self.attn(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class Stem(nn.Module):
    """Two 3×3 convolutions; the first may have a stride of 2."""

    def __init__(self, channels: int, width: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.norm1 = BatchNormAct(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        return self.conv2(self.norm1(self.conv1(images)))


class Layer(nn.Module):
    """The blocks of one stage; the first downsamples."""

    def __init__(self, c: CoAtNetConfig, i: int, rates: list[float]):
        super().__init__()
        before, width = (c.widths[i - 1] if i else c.first), c.widths[i]
        blocks: list[nn.Module] = []
        for j, rate in enumerate(rates):
            channels, stride = (before, 2) if j == 0 else (width, 1)
            if i < c.convs:
                blocks.append(MBConv(channels, width, stride, rate))
            else:
                blocks.append(CoAtBlock(channels, width, stride, c.grids[i], c.drop, rate))
        self.blocks = nn.ModuleList(blocks)

    def attending(self) -> list[CoAtBlock]:
        """The blocks with attention."""
        return [block for block in self.blocks if isinstance(block, CoAtBlock)]


class Head(nn.Module):
    """Norm, hidden layer and classifier; a headless model has the norm only."""

    def __init__(self, width: int, classes: int):
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=1e-6)
        hidden = nn.Sequential(OrderedDict(fc=nn.Linear(width, width), act=nn.Tanh())) if classes else None
        self.pre_logits = hidden
        self.fc = nn.Linear(width, classes) if classes else None

    def forward(self, features: Tensor) -> Tensor:
        """The logits of features that are already normalised: the norm is a stage of its own."""
        if self.pre_logits is None or self.fc is None:
            return features
        return self.fc(self.pre_logits(features))


class CoAtNet(Model):
    config: CoAtNetConfig

    def __init__(self, config: CoAtNetConfig):
        super().__init__()
        c = self.config = config
        self.stem = Stem(c.channels, c.first, 2 if c.shrink else 1)
        rates = torch.linspace(0, c.drop_path, sum(c.depths), device="cpu").tolist()
        ends = [sum(c.depths[: i + 1]) for i in range(len(c.depths))]
        self.layers = nn.ModuleList(Layer(c, i, rates[end - c.depths[i] : end]) for i, end in enumerate(ends))
        self.head = Head(c.width, c.classes)
        self._head = (Stage(self, self.head.forward, [self.head.pre_logits, self.head.fc]),)
        if not self.head.norm.weight.is_meta:
            self._initialise()

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = self._head[0](self.embed(images))
        return outputs  # B K

    def embed(self, images: Tensor) -> Tensor:
        """One feature vector per image, the average-pooled last feature map after its norm: (B, D)."""
        return self.head.norm(self.features(images).mean(dim=(2, 3)))

    def features(self, images: Tensor, levels: bool = False) -> Any:
        """The last feature map, (B, D, h, w); with `levels`, the feature map of every stage."""
        check_images(images, self.config)
        x = self.stem(images)
        maps: list[Tensor] = []
        for i, layer in enumerate(self._layers()):
            maps = [*maps, x] if levels and i else []
            for block in layer.blocks:
                x = block(x)  # B D h w
        return [*maps, x] if levels else x

    def stages(self) -> list[nn.Module]:
        """The stem, each block, the final norm, the head."""
        blocks = [block for layer in self._layers() for block in layer.blocks]
        return [self.stem, *blocks, self.head.norm, *(self._head if self.config.classes else [])]

    @classmethod
    def resized_state(
        cls,
        state: Mapping[str, Tensor],
        old: CoAtNetConfig,
        new: CoAtNetConfig,
        method: Interpolation,  # noqa: ARG003  # of position embeddings, which a CoAtNet does not have
    ) -> dict[str, Tensor]:
        """Relative position biases are resampled to the offsets of the new feature maps, as in timm."""
        resampled = dict(state)
        for name, value in state.items():
            if name.endswith("relative_position_bias_table"):
                i = int(name.split(".")[1])  # layers.2.blocks.0…
                resampled[name] = resample_offsets(value, old.grids[i], new.grids[i])
        return resampled

    def attentions(self) -> list[AttentionLayer]:
        return [
            AttentionLayer(block.attn, grid, stride)
            for layer, grid, stride in zip(self._layers(), self.config.grids, self.config.strides, strict=True)
            for block in layer.attending()
        ]

    def last_map(self) -> tuple[nn.Module, int]:
        return self._layers()[-1].blocks[-1], 1

    def bias_tables(self) -> dict[int, list[tuple[Tensor, Grid]]]:
        return {
            number: [(b.attn.rel_pos.relative_position_bias_table, b.attn.rel_pos.grid) for b in layer.attending()]
            for number, layer in enumerate(self._layers(), start=1)
            if layer.attending()
        }

    def _layers(self) -> list[Layer]:
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                fan_out = module.kernel_size[0] * module.kernel_size[1] * module.out_channels // module.groups
                nn.init.normal_(module.weight, std=(2 / fan_out) ** 0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for block in self.modules():
            if isinstance(block, CoAtBlock):
                for conv in (block.attn.qkv, block.attn.proj, block.mlp.fc1, block.mlp.fc2):
                    nn.init.xavier_uniform_(conv.weight)
                nn.init.trunc_normal_(block.attn.rel_pos.relative_position_bias_table, std=0.02)
        for layer in self.classifiers():
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]  # it has one
