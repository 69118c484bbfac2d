"""The hybrid of the ViT paper: "An Image is Worth 16x16 Words", https://arxiv.org/abs/2010.11929, section 3.1.

A ResNet extracts a feature map, and a ViT reads it in patches of 1×1: every position is a token. The rest is a ViT with
a class token and learned position embeddings:

    z0 = [class; x1·E; …; xN·E] + Epos,  x = ResNet(image)           `tokens`

The ResNet is not BiT's: it is a v1.5, with ReLU after the residual sum, GroupNorm and standardised weights. Sizes are
those of the authors' code, https://arxiv.org/abs/2106.10270. R50+ViT-B/16 drops the fourth stage and moves its blocks
to the third: 3, 4, 9. R+ViT-Ti/16 has only the stem, with patches of 8×8 on its output; its stride is 32, despite its
name.

Differences from the paper: none. Initialisation follows the authors' JAX code.

Legend: B batch, N tokens, D width, K classes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import Ints
from vitrail.errors import UserError
from vitrail.models.bit import GroupNormAct, StdConv
from vitrail.models.layers import Block, Dropout, Levels, Stage, as_map, encode_for_head, head_of, kept, level_depths
from vitrail.models.model import AttentionLayer, Model, ModelConfig, attention_layers
from vitrail.models.patterns import choice
from vitrail.models.position import Grid, Interpolation, resample_state
from vitrail.models.validate import (
    check_all,
    check_counts,
    check_heads,
    check_images,
    check_multiple,
    check_rates,
    check_stages,
)


@dataclass(frozen=True)
class HybridConfig(ModelConfig):
    width: int  # of the tokens
    depth: int  # encoder blocks
    heads: int
    mlp: int  # hidden units of the encoder's MLPs
    widths: Ints  # output channels of each ResNet stage; () is the stem only
    depths: Ints  # blocks of each ResNet stage
    first: int = 64  # width of the stem
    groups: int = 32  # groups of GroupNorm
    patch: int = 1  # patch size on the ResNet's feature map
    img_size: tuple[int, int] = (224, 224)
    channels: int = 3
    classes: int = 1000
    drop: float = 0.0
    drop_path: float = 0.0
    act: Literal["gelu", "gelu_tanh"] = "gelu"  # the authors' JAX code has the latter
    eps: float = 1e-6  # of LayerNorm
    resample: Interpolation = "bicubic"  # of position embeddings at another image size
    attention: str = "global"  # the pattern, such as "window:7": see `patterns.py`

    def __post_init__(self) -> None:
        check_counts(self, "width", "depth", "heads", "mlp", "first", "groups", "patch")
        if self.widths:
            check_counts(self, "widths", "depths")
        check_stages(self, "depths")
        check_rates(self)
        check_heads((self.width,), (self.heads,))
        choice(self.attention, self.depth)
        check_multiple(self, self.stride, "the stride")
        for width in (4 * self.first, *self.widths):
            if width % (4 * self.groups):
                raise UserError(
                    f"'widths' must be multiples of 4 · groups = {4 * self.groups}, "
                    f"and 'first' of groups = {self.groups}, but one is {width}."
                )

    @property
    def stride(self) -> int:
        """Pixels per token: the stem downsamples by 4, each stage but the first by 2."""
        return 4 * 2 ** max(len(self.widths) - 1, 0) * self.patch

    @property
    def step(self) -> int:
        """The image sides must be multiples of this."""
        return self.stride

    @property
    def grid(self) -> Grid:
        """Rows and columns of patches."""
        return self.img_size[0] // self.stride, self.img_size[1] // self.stride

    @property
    def length(self) -> int:
        """Tokens in the encoder's sequence."""
        return 1 + self.grid[0] * self.grid[1]


_TI, _S, _B, _L = (192, 12, 3, 768), (384, 12, 6, 1536), (768, 12, 12, 3072), (1024, 24, 16, 4096)
_WIDTHS = (256, 512, 1024, 2048)
# The paper's and AugReg's hybrids, and our own nano for images of 28 to 64 pixels.
CONFIGS = {
    "hybrid_nano": HybridConfig(128, 6, 4, 256, (64,), (2,), first=32, groups=8, img_size=(32, 32)),
    "r_vit_ti16": HybridConfig(*_TI, (), (), patch=8),
    "r26_vit_s32": HybridConfig(*_S, _WIDTHS, (2, 2, 2, 2)),
    "r26_vit_b32": HybridConfig(*_B, _WIDTHS, (2, 2, 2, 2)),
    "r50_vit_b16": HybridConfig(*_B, _WIDTHS[:3], (3, 4, 9)),
    "r50_vit_b32": HybridConfig(*_B, _WIDTHS, (3, 4, 6, 3)),
    "r50_vit_l32": HybridConfig(*_L, _WIDTHS, (3, 4, 6, 3)),
}


class Downsample(nn.Module):
    """The projection shortcut of a block that changes resolution or width."""

    def __init__(self, channels: int, out: int, stride: int, groups: int):
        super().__init__()
        self.conv = StdConv(channels, out, 1, stride, same=True)
        self.norm = nn.GroupNorm(groups, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


class Bottleneck(nn.Module):
    """A bottleneck: 1×1, 3×3 and 1×1 convolutions, each followed by its norm; the last ReLU follows the sum."""

    def __init__(self, channels: int, out: int, stride: int, groups: int):
        super().__init__()
        inner = out // 4
        changes = stride > 1 or channels != out
        self.downsample = Downsample(channels, out, stride, groups) if changes else None
        self.conv1 = StdConv(channels, inner, 1)
        self.norm1 = GroupNormAct(groups, inner)
        self.conv2 = StdConv(inner, inner, 3, stride, same=True)
        self.norm2 = GroupNormAct(groups, inner)
        self.conv3 = StdConv(inner, out, 1)
        self.norm3 = nn.GroupNorm(groups, out)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.norm2(self.conv2(self.norm1(self.conv1(x))))
        return F.relu(shortcut + self.norm3(self.conv3(x)))


class Pool(nn.Module):
    """Max pooling of 3×3 with stride 2."""

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(F.pad(x, (0, 1, 0, 1)), 3, 2)  # zero padding is safe: inputs follow a ReLU


class ResNet(nn.Module):
    def __init__(self, c: HybridConfig):
        super().__init__()
        self.stem = _stem(c)
        channels = c.first
        stages: list[nn.Module] = []
        for i, (width, depth) in enumerate(zip(c.widths, c.depths, strict=True)):
            blocks = nn.Sequential()
            for j in range(depth):
                blocks.append(Bottleneck(channels, width, 2 if i > 0 and j == 0 else 1, c.groups))
                channels = width
            stages.append(nn.Sequential(OrderedDict(blocks=blocks)))
        self.stages = nn.Sequential(*stages)

    def forward(self, images: Tensor) -> Tensor:
        return self.stages(self.stem(images))


def _stem(c: HybridConfig) -> nn.Sequential:
    conv = StdConv(c.channels, c.first, 7, 2, same=True)
    return nn.Sequential(OrderedDict(conv=conv, norm=GroupNormAct(c.groups, c.first), pool=Pool()))


class HybridEmbed(nn.Module):
    """The ResNet, and the linear projection of the patches of its feature map."""

    def __init__(self, c: HybridConfig):
        super().__init__()
        self.backbone = ResNet(c) if c.widths else _stem(c)
        features = c.widths[-1] if c.widths else c.first
        self.proj = nn.Conv2d(features, c.width, c.patch, stride=c.patch)

    def forward(self, images: Tensor) -> Tensor:
        return self.proj(self.backbone(images)).flatten(2).transpose(1, 2)  # B N D


class Hybrid(Model):
    config: HybridConfig

    def __init__(self, config: HybridConfig):
        super().__init__()
        c = self.config = config
        self.patch_embed = HybridEmbed(c)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, c.width))
        self.pos_embed = nn.Parameter(torch.zeros(1, c.length, c.width))
        self.drop = Dropout(c.drop)
        rates = [c.drop_path * i / max(c.depth - 1, 1) for i in range(c.depth)]
        patterns = choice(c.attention, c.depth).layers(c.depth, c.grid, prefix=1)
        self.blocks = nn.ModuleList(
            Block(c.width, c.heads, c.mlp, c.drop, rate, act=c.act, eps=c.eps, pattern=pattern)
            for rate, pattern in zip(rates, patterns, strict=True)
        )
        self.norm = nn.LayerNorm(c.width, c.eps)
        self.head = head_of(c.width, c.classes)
        self._entry = (Stage(self, self._enter, [self.patch_embed], ["cls_token", "pos_embed"]),)
        if not self.norm.weight.is_meta:
            self._initialise()

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.embed(images))  # B K

    def embed(self, images: Tensor) -> Tensor:
        """One feature vector per image, the class token's: (B, D)."""
        return self.norm(encode_for_head(self.blocks, self.tokens(images), 1))[:, 0]

    def features(self, images: Tensor, levels: Levels = False) -> Any:
        """The patch tokens after the final norm as a map, (B, D, h, w); with `levels`, also after earlier blocks.

        All levels have the same stride; only the last is normalised.
        """
        x, maps, taps = self.tokens(images), [], level_depths(self.config.depth, levels)
        for depth, block in enumerate(self.blocks, start=1):
            x = block(x)
            if levels and depth in taps[:-1]:
                maps.append(self._map(x))
        last = self._map(self.norm(x))
        return [*maps, last] if levels else last

    def _map(self, x: Tensor) -> Tensor:
        return as_map(x[:, 1:], self.config.grid)

    def tokens(self, images: Tensor) -> Tensor:
        """The encoder's input, position embeddings added: (B, N, D)."""
        tokens: Tensor = self._entry[0](images)
        return tokens

    def _enter(self, images: Tensor) -> Tensor:
        check_images(images, self.config)
        x = self.patch_embed(images)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        return self.drop(x + self.pos_embed)

    def encode(self, tokens: Tensor, keep: Tensor | None = None, norm: bool | None = None) -> Tensor:
        """The transformer encoder and its final LayerNorm; with `keep`, over the tokens with these indices only."""
        if keep is not None:
            tokens = kept(tokens, keep)
        else:
            check_all(tokens, self.config)
        for block in self.blocks:
            tokens = block(tokens, keep)
        return tokens if norm is False else self.norm(tokens)

    def stages(self) -> list[nn.Module]:
        """The ResNet with the token embedding, each block, the final norm with pooling, the head."""
        return [*self._entry, *self.blocks, self.norm, *([self.head] if self.config.classes else [])]

    @classmethod
    def resized_state(
        cls, state: Mapping[str, Tensor], old: HybridConfig, new: HybridConfig, method: Interpolation
    ) -> dict[str, Tensor]:
        return resample_state(state, old.grid, new.grid, method)

    def attentions(self) -> list[AttentionLayer]:
        return attention_layers(self.encoder(), self.config.grid, self.config.stride)

    def encoder(self) -> list[Block]:
        return [block for block in self.blocks if isinstance(block, Block)]

    def position_embeddings(self) -> list[tuple[Tensor, Grid]]:
        return [(self.pos_embed, self.config.grid)]

    def _initialise(self) -> None:
        """As in the authors' code: Xavier for the encoder, LeCun for convolutions, 0.02 for positions, zero head."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Conv2d):
                nn.init.trunc_normal_(module.weight, std=module.weight[0].numel() ** -0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for block in self.blocks:
            assert isinstance(block, Block)
            nn.init.xavier_uniform_(block.attn.qkv.weight, gain=2**0.5)  # q, k and v are stacked in one matrix
            nn.init.normal_(block.mlp.fc1.bias, std=1e-6)
            nn.init.normal_(block.mlp.fc2.bias, std=1e-6)
        nn.init.normal_(self.pos_embed, std=0.02)
        for layer in self.classifiers():
            nn.init.zeros_(layer.weight)
