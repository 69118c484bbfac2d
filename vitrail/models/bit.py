"""Big Transfer: "Big Transfer (BiT): General Visual Representation Learning", https://arxiv.org/abs/1912.11370.

The convolutional baseline of the ViT paper: a wide ResNet-v2, whose pre-activation bottlenecks apply norm and ReLU
before each convolution (https://arxiv.org/abs/1603.05027). GroupNorm and weight standardisation
(https://arxiv.org/abs/1903.10520) replace BatchNorm, so images of a batch are independent and any batch size works:

    w' = (w - mean(w)) / std(w)                  for each filter          `StdConv`
    y  = x + conv1×1(conv3×3(conv1×1(x)))        each conv: relu(GN(·))   `PreActBottleneck`

Differences from the paper: none for its models. The stem of `bit_nano` does not downsample, as is usual for images of
32 pixels. Initialisation is PyTorch's usual one for ResNets, with a zero head.

Legend: B batch, D width, K classes, (h, w) feature map.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import Ints
from vitrail.errors import UserError
from vitrail.models.layers import Dropout, DropPath
from vitrail.models.model import Model, ModelConfig
from vitrail.models.position import Grid
from vitrail.models.validate import check_counts, check_images, check_rates, check_stages


@dataclass(frozen=True)
class BiTConfig(ModelConfig):
    widths: Ints  # output channels of each stage; its 3×3 convolutions have a quarter
    depths: Ints  # blocks of each stage
    shrink: bool = True  # whether the stem downsamples by 4
    groups: int = 32  # groups of GroupNorm
    img_size: tuple[int, int] = (224, 224)
    channels: int = 3
    classes: int = 1000
    drop: float = 0.0
    drop_path: float = 0.0

    def __post_init__(self) -> None:
        check_counts(self, "widths", "depths", "groups")
        check_stages(self, "depths")
        check_rates(self)
        for width in self.widths:
            if width % (4 * self.groups):
                raise UserError(f"'widths' must be multiples of 4 · groups = {4 * self.groups}, but one is {width}.")

    @property
    def first(self) -> int:
        """The width of the stem: a quarter of the first stage's."""
        return self.widths[0] // 4

    @property
    def width(self) -> int:
        """The width of the last feature map."""
        return self.widths[-1]

    @property
    def stride(self) -> int:
        """Pixels per position of the last feature map: every stage but the first downsamples by 2."""
        return 2 ** (len(self.widths) - 1 + 2 * self.shrink)

    @property
    def grids(self) -> list[Grid]:
        """Rows and columns of the feature map of each stage; every downsampling rounds up."""
        strides = [2 ** (i + 2 * self.shrink) for i in range(len(self.widths))]
        return [(-(-self.img_size[0] // stride), -(-self.img_size[1] // stride)) for stride in strides]

    @property
    def grid(self) -> Grid:
        """Rows and columns of the last feature map."""
        return self.grids[-1]


def _resnet(*depths: int, factor: int) -> BiTConfig:
    return BiTConfig(tuple(factor * width for width in (256, 512, 1024, 2048)), depths)


# The paper's models, R50x2 from the ViT paper, and our own nano for images of 28 to 64 pixels.
CONFIGS = {
    "bit_nano": BiTConfig((64, 128, 256, 512), (2, 2, 2, 2), shrink=False, groups=8, img_size=(32, 32)),
    "bit_r50x1": _resnet(3, 4, 6, 3, factor=1),
    "bit_r50x2": _resnet(3, 4, 6, 3, factor=2),
    "bit_r50x3": _resnet(3, 4, 6, 3, factor=3),
    "bit_r101x1": _resnet(3, 4, 23, 3, factor=1),
    "bit_r101x3": _resnet(3, 4, 23, 3, factor=3),
    "bit_r152x2": _resnet(3, 8, 36, 3, factor=2),
    "bit_r152x4": _resnet(3, 8, 36, 3, factor=4),
}


class StdConv(nn.Conv2d):
    """A convolution with standardised filters, of mean 0 and variance 1. `same` pads as TensorFlow's SAME does."""

    def __init__(self, channels: int, out: int, kernel: int, stride: int = 1, same: bool = False):
        # Output size is input size / stride, rounded up: an odd total padding has its extra pixel at the end.
        uneven = same and stride > 1
        super().__init__(channels, out, kernel, stride, 0 if uneven else kernel // 2, bias=False)
        self.pads = (
            ((kernel - stride) // 2, kernel - stride - (kernel - stride) // 2) * 2 if uneven and kernel > 1 else ()
        )

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, self.pads) if self.pads else x
        filters, padding, centre = self.filters(), self.padding, self.kernel_size[0] // 2
        if x.shape[-2:] == (1, 1) and centre:
            # A single pixel meets only the centre. PyTorch 2.13 leaves the gradient of the rest unset, on CPUs in bf16.
            filters, padding = filters[:, :, centre : centre + 1, centre : centre + 1], (0, 0)
        return F.conv2d(x, filters, None, self.stride, padding)

    def filters(self) -> Tensor:
        """The standardised filters, as applied."""
        var, mean = torch.var_mean(self.weight, dim=(1, 2, 3), keepdim=True, correction=0)
        return (self.weight - mean) * torch.rsqrt(var + 1e-8)


class GroupNormAct(nn.GroupNorm):
    """GroupNorm, then ReLU."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(super().forward(x))


class Downsample(nn.Module):
    """The projection shortcut of a block that changes resolution or width."""

    def __init__(self, channels: int, out: int, stride: int):
        super().__init__()
        self.conv = StdConv(channels, out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class PreActBottleneck(nn.Module):
    """A pre-activation bottleneck: 1×1, 3×3 and 1×1 convolutions, each after GroupNorm and ReLU."""

    def __init__(self, channels: int, out: int, stride: int, groups: int, drop_path: float):
        super().__init__()
        inner = out // 4
        changes = stride > 1 or channels != out
        self.downsample = Downsample(channels, out, stride) if changes else None
        self.norm1 = GroupNormAct(groups, channels)
        self.conv1 = StdConv(channels, inner, 1)
        self.norm2 = GroupNormAct(groups, inner)
        self.conv2 = StdConv(inner, inner, 3, stride)
        self.norm3 = GroupNormAct(groups, inner)
        self.conv3 = StdConv(inner, out, 1)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        shortcut = x if self.downsample is None else self.downsample(y)
        y = self.conv3(self.norm3(self.conv2(self.norm2(self.conv1(y)))))
        return shortcut + self.drop_path(y)


class Layer(nn.Module):
    """The blocks of one stage; the first changes resolution and width."""

    def __init__(self, blocks: list[nn.Module]):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)


class Stem(nn.Module):
    """A 7×7 convolution and a max pool, each of stride 2; without `shrink`, a 3×3 convolution of stride 1."""

    def __init__(self, channels: int, width: int, shrink: bool):
        super().__init__()
        self.conv = StdConv(channels, width, 7, 2) if shrink else StdConv(channels, width, 3)
        self.shrink = shrink

    def forward(self, images: Tensor) -> Tensor:
        x = self.conv(images)
        # The original pads the max pool with zeros. Here it pads with 1e-30: ONNX Runtime fuses zero padding into the
        # pool, which then pads with -inf (https://github.com/microsoft/onnxruntime/pull/18136).
        return F.max_pool2d(F.pad(x, (1, 1, 1, 1), value=1e-30), 3, 2) if self.shrink else x


class Head(nn.Module):
    """The classifier of pooled features: a 1×1 convolution, as in the original code."""

    def __init__(self, width: int, classes: int):
        super().__init__()
        self.fc = nn.Conv2d(width, classes, 1)

    def forward(self, features: Tensor) -> Tensor:
        return self.fc(features[:, :, None, None]).flatten(1)


class BiT(Model):
    config: BiTConfig

    def __init__(self, config: BiTConfig):
        super().__init__()
        c = self.config = config
        self.stem = Stem(c.channels, c.first, c.shrink)
        rates = iter(torch.linspace(0, c.drop_path, sum(c.depths), device="cpu").tolist())
        channels = c.first
        layers: list[nn.Module] = []
        for i, (width, depth) in enumerate(zip(c.widths, c.depths, strict=True)):
            blocks: list[nn.Module] = []
            for j in range(depth):
                stride = 2 if i > 0 and j == 0 else 1
                blocks.append(PreActBottleneck(channels, width, stride, c.groups, next(rates)))
                channels = width
            layers.append(Layer(blocks))
        self.layers = nn.ModuleList(layers)
        self.norm = GroupNormAct(c.groups, c.width)
        self.drop = Dropout(c.drop)
        self.head = Head(c.width, c.classes) if c.classes else nn.Identity()
        if not self.norm.weight.is_meta:
            self._initialise()

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.drop(self.embed(images)))  # B K

    def embed(self, images: Tensor) -> Tensor:
        """One feature vector per image, the average-pooled last feature map: (B, D)."""
        return self.features(images).mean(dim=(2, 3))

    def features(self, images: Tensor, levels: bool = False) -> Any:
        """The last feature map after its norm, (B, D, h, w); with `levels`, the feature map of every stage."""
        check_images(images, self.config)
        x = self.stem(images)
        maps: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            maps = [*maps, x] if levels and i else []
            for block in cast(Layer, layer).blocks:
                x = block(x)  # B D h w
        last = self.norm(x)
        return [*maps, last] if levels else last

    def stages(self) -> list[nn.Module]:
        """The stem, each block, the final norm, the head."""
        blocks = [block for layer in self.layers for block in cast(Layer, layer).blocks]
        return [self.stem, *blocks, self.norm, *([self.head] if self.config.classes else [])]

    def last_map(self) -> tuple[nn.Module, int]:
        return self.norm, 1

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, StdConv):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        for layer in self.classifiers():
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]  # it has one
