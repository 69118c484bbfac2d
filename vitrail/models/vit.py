"""The Vision Transformer: "An Image is Worth 16x16 Words", https://arxiv.org/abs/2010.11929.

An image is split into patches, each linearly embedded; a class token and position embeddings are added, a standard
transformer encoder processes the sequence, and a head classifies:

    z0 = [class; x1·E; …; xN·E] + Epos                      (1)  `tokens`
    z' = MSA(LN(z)) + z,  z = MLP(LN(z')) + z'              (2, 3)  `Block`
    y  = LN(zL)[class]                                      (4)  `_leave`

Options beyond the paper, off in its models: register tokens (https://arxiv.org/abs/2309.16588), LayerScale, gated MLPs,
a convolutional stem (https://arxiv.org/abs/2106.14881), and other ways of pooling: attention (`pool="map"`,
https://arxiv.org/abs/2106.04560), DeiT's distillation token with its own head ("cls_dist",
https://arxiv.org/abs/2012.12877), the class token concatenated with the average, which DINOv2's linear heads read
("cls_gap", https://arxiv.org/abs/2304.07193), and averaging before the final LayerNorm, without a class token
("gap_norm") or with an unused one, as MAE is fine-tuned ("mae", https://arxiv.org/abs/2111.06377); and CLIP's image
tower (`stem="clip"`, https://arxiv.org/abs/2103.00020): patches without bias, a LayerNorm before the encoder.
Initialisation follows the authors' JAX code.

GELU is exact by default. The authors' JAX code approximates it by tanh, so their weights have `act="gelu_tanh"`.

Legend: B batch, N tokens, D width, F features, K classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitrail.config import Pos
from vitrail.errors import UserError
from vitrail.models.layers import (
    Activation,
    AttentionPool,
    Block,
    Dropout,
    Levels,
    Stage,
    as_map,
    encode_for_head,
    head_of,
    kept,
    level_depths,
)
from vitrail.models.model import AttentionLayer, Model, ModelConfig, attention_layers
from vitrail.models.patterns import choice
from vitrail.models.position import Grid, Interpolation, RelativeBias, crossed, every_layer, resample_state, sincos2d
from vitrail.models.validate import check_all, check_counts, check_heads, check_images, check_multiple, check_rates

Pool = Literal["cls", "cls_dist", "cls_gap", "gap", "gap_norm", "mae", "map"]


@dataclass(frozen=True)
class ViTConfig(ModelConfig):
    width: int  # of the tokens
    depth: int  # encoder blocks
    heads: int
    mlp: int  # hidden units of the MLPs
    patch: int  # pixels per side
    img_size: tuple[int, int] = (224, 224)
    channels: int = 3
    classes: int = 1000
    pool: Pool = "cls"  # how tokens become one feature vector
    pos: Pos = "learned"
    head: Literal["linear", "tanh"] = "linear"  # "tanh" adds a hidden layer, as in the paper's pre-training
    stem: Literal["patch", "conv", "clip"] = "patch"  # "clip": no bias, and a LayerNorm before the encoder
    act: Activation = "gelu"
    registers: int = 0  # register tokens
    layer_scale: float = 0.0  # initial value; 0 disables LayerScale
    drop: float = 0.0  # dropout rate
    drop_path: float = 0.0  # stochastic depth rate of the last block
    eps: float = 1e-6  # of LayerNorm
    resample: Interpolation = "bicubic"  # of position embeddings at another image size
    attention: str = "global"  # the pattern, such as "window:7": see `patterns.py`

    def __post_init__(self) -> None:
        check_counts(self, "width", "depth", "heads", "mlp", "patch")
        if self.registers < 0:
            raise UserError(f"'registers' must be at least 0, but it is {self.registers}.")
        check_rates(self)
        check_multiple(self, self.patch, "the patch size")
        check_heads((self.width,), (self.heads,))
        choice(self.attention, self.depth)
        if self.kind in ("learned2d", "sincos2d") and self.width % 4:
            raise UserError(f"'{self.pos}' positions need a width that is a multiple of 4, but it is {self.width}.")

    @property
    def stride(self) -> int:
        """Pixels per patch."""
        return self.patch

    @property
    def step(self) -> int:
        """The image sides must be multiples of this."""
        return self.patch

    @property
    def grid(self) -> Grid:
        """Rows and columns of patches."""
        return self.img_size[0] // self.patch, self.img_size[1] // self.patch

    @property
    def kind(self) -> str:
        """The kind of positions, wherever they are added."""
        return self.pos.partition("_")[0]

    @property
    def placed(self) -> int:
        """Prefix tokens with position embeddings: the class token, then DeiT's distillation token."""
        return {"cls": 1, "cls_dist": 2, "cls_gap": 1, "mae": 1}.get(self.pool, 0)

    @property
    def prefix(self) -> int:
        """Tokens before the patches: the placed ones and the registers."""
        return self.placed + self.registers

    @property
    def length(self) -> int:
        """Tokens in the encoder's sequence."""
        return self.prefix + self.grid[0] * self.grid[1]

    @property
    def features(self) -> int:
        """The length of an image's feature vector."""
        return 2 * self.width if self.pool == "cls_gap" else self.width


class PatchEmbed(nn.Module):
    """Splits the image into patches and projects each one: a convolution whose stride is its size."""

    def __init__(self, channels: int, width: int, patch: int, bias: bool = True):
        super().__init__()
        self.proj = nn.Conv2d(channels, width, patch, stride=patch, bias=bias)

    def forward(self, images: Tensor) -> Tensor:
        return self.proj(images).flatten(2).transpose(1, 2)  # B N D


class ConvStem(nn.Module):
    """Overlapping 3×3 convolutions of stride 2, as many as the patch size allows, then a projection.

    There is still one token per patch, but it sees beyond the patch; on small data this saves many epochs.
    """

    def __init__(self, channels: int, width: int, patch: int):
        super().__init__()
        halvings = (patch & -patch).bit_length() - 1
        layers: list[nn.Module] = []
        for i in range(halvings):
            out = max(width >> (halvings - 1 - i), 16)
            groups = max(g for g in (1, 2, 4, 8) if out % g == 0)
            layers += [nn.Conv2d(channels, out, 3, 2, 1, bias=False), nn.GroupNorm(groups, out), nn.GELU()]
            channels = out
        self.convs = nn.Sequential(*layers)
        rest = patch >> halvings
        self.proj = nn.Conv2d(channels, width, rest, stride=rest)

    def forward(self, images: Tensor) -> Tensor:
        return self.proj(self.convs(images)).flatten(2).transpose(1, 2)  # B N D


class ViT(Model):
    config: ViTConfig
    patchwise = True

    def __init__(self, config: ViTConfig):
        super().__init__()
        c = self.config = config
        patches = c.grid[0] * c.grid[1]

        clip, sizes = c.stem == "clip", (c.channels, c.width, c.patch)
        self.patch_embed = ConvStem(*sizes) if c.stem == "conv" else PatchEmbed(*sizes, bias=not clip)
        self.norm_pre = nn.LayerNorm(c.width, c.eps) if clip else None
        self.cls_token = nn.Parameter(torch.zeros(1, 1, c.width)) if c.placed else None
        self.dist_token = nn.Parameter(torch.zeros(1, 1, c.width)) if c.pool == "cls_dist" else None
        self.reg_token = nn.Parameter(torch.zeros(1, c.registers, c.width)) if c.registers else None

        if c.kind in ("learned", "patches"):
            placed = c.placed if c.kind == "learned" else 0
            self.pos_embed = nn.Parameter(torch.zeros(1, placed + patches, c.width))
        elif c.kind == "learned2d":
            self.pos_row = nn.Parameter(torch.zeros(1, c.grid[0], c.width // 2))
            self.pos_col = nn.Parameter(torch.zeros(1, c.grid[1], c.width // 2))

        self.drop = Dropout(c.drop)
        patterns = choice(c.attention, c.depth).layers(c.depth, c.grid, c.prefix)
        self.blocks = nn.ModuleList(
            Block(
                c.width,
                c.heads,
                c.mlp,
                c.drop,
                c.drop_path * i / max(c.depth - 1, 1),
                c.layer_scale,
                RelativeBias(c.grid, c.heads, c.prefix) if c.pos == "relative" else None,
                c.act,
                c.eps,
                every_layer(c, self.positions) if i else None,
                patterns[i],
            )
            for i in range(c.depth)
        )
        self.norm = nn.LayerNorm(c.width, c.eps)
        self.attn_pool = AttentionPool(c.width, c.heads, c.mlp, c.act, c.eps) if c.pool == "map" else None
        hidden = c.head == "tanh" and c.classes  # the hidden layer belongs to the head
        self.pre_logits = nn.Linear(c.features, c.features) if hidden else None
        self.head = head_of(c.features, c.classes)
        self.head_dist = nn.Linear(c.width, c.classes) if c.pool == "cls_dist" and c.classes else None

        loose = [name for name, _ in self.named_parameters(recurse=False)]
        self._stages = (
            Stage(self, self._enter, [self.patch_embed, self.norm_pre], loose),
            Stage(self, self._leave, [self.norm, self.attn_pool]),
            Stage(self, self._answer, [self.pre_logits, self.head, self.head_dist]),
        )
        if not self.norm.weight.is_meta:
            self._initialise()

    def forward(self, images: Tensor) -> Tensor:
        answers = self.heads(images)
        return answers[0] if len(answers) == 1 else (answers[0] + answers[1]) / 2  # B K

    def heads(self, images: Tensor) -> tuple[Tensor, ...]:
        """The logits of each head, (B, K): one head, or those of the class and DeiT's distillation token."""
        if not self.config.classes:
            return (self.embed(images),)
        answers: tuple[Tensor, ...] = self._stages[2](self._pooled(images))
        return answers

    def embed(self, images: Tensor) -> Tensor:
        """One feature vector per image: (B, F)."""
        x = self._pooled(images)
        return (x[:, 0] + x[:, 1]) / 2 if self.config.pool == "cls_dist" else x

    def features(self, images: Tensor, levels: Levels = False) -> Any:
        """The patch tokens after the final norm as a map, (B, D, h, w); with `levels`, also after earlier blocks.

        All levels have the same stride; only the last is normalised.
        """
        x, maps, taps = self.tokens(images), [], level_depths(self.config.depth, levels)
        for depth, block in enumerate(self.blocks, start=1):
            x = block(x)
            if levels and depth in taps[:-1]:
                maps.append(self._map(x))
        last = self._map(self._stages[1](x, False))
        return [*maps, last] if levels else last

    def tokens(self, images: Tensor) -> Tensor:
        """Equation 1: the encoder's input, position embeddings added: (B, N, D)."""
        tokens: Tensor = self._stages[0](images)
        return tokens

    def _enter(self, images: Tensor) -> Tensor:
        c = self.config
        check_images(images, c)
        x = self.patch_embed(images)
        batch = x.shape[0]
        positions = self.positions()
        if positions is not None:
            x = x + positions[:, -x.shape[1] :]
        prefix: list[Tensor] = []
        if self.cls_token is not None:
            placed = self.cls_token if self.dist_token is None else torch.cat([self.cls_token, self.dist_token], dim=1)
            placed = placed + self.pos_embed[:, : c.placed] if c.kind == "learned" else placed
            prefix.append(placed.expand(batch, -1, -1))
        if self.reg_token is not None:
            prefix.append(self.reg_token.expand(batch, -1, -1))
        x = self.drop(torch.cat([*prefix, x], dim=1))
        return x if self.norm_pre is None else self.norm_pre(x)

    def encode(self, tokens: Tensor, keep: Tensor | None = None, norm: bool | None = None) -> Tensor:
        """Equations 2 to 4: the transformer encoder and its final LayerNorm, (B, N, D).

        With `keep`, token indices of shape (n,) or (B, n), only these tokens are encoded: (B, n, D). The class token's
        index is 0. By default, the LayerNorm is left out for `pool="gap_norm"` and `"mae"`, which apply it in `embed`.
        """
        if keep is not None:
            tokens = kept(tokens, keep)
        else:
            placed = self.config.pos.endswith(("relative", "_every", "_shared"))
            check_all(tokens, self.config, "positions in its blocks" if placed else "")
        for block in self.blocks:
            tokens = block(tokens, keep)
        norm = self.config.pool not in ("gap_norm", "mae") if norm is None else norm
        return self._stages[1](tokens, False) if norm else tokens

    def _pooled(self, images: Tensor) -> Tensor:
        """The head's input: (B, F), or (B, 2, F) for two tokens."""
        only = self.config.placed if self.config.pool in ("cls", "cls_dist") else None
        pooled: Tensor = self._stages[1](encode_for_head(self.blocks, self.tokens(images), only))
        return pooled

    def _leave(self, x: Tensor, pool: bool = True) -> Tensor:
        """The final norm and the pooling."""
        c = self.config
        if not pool:
            return self.norm(x)
        if c.pool in ("gap_norm", "mae"):
            return self.norm(x[:, c.prefix :].mean(dim=1))
        x = self.norm(x)
        if c.pool in ("cls", "cls_dist"):
            return x[:, 0] if c.pool == "cls" else x[:, :2]
        patches = x[:, c.prefix :]
        if self.attn_pool is not None:
            return self.attn_pool(patches)
        average = patches.mean(dim=1)
        return torch.cat([x[:, 0], average], dim=1) if c.pool == "cls_gap" else average

    def _answer(self, x: Tensor) -> tuple[Tensor, ...]:
        x = x if self.pre_logits is None else torch.tanh(self.pre_logits(x))
        return (self.head(x),) if self.head_dist is None else (self.head(x[:, 0]), self.head_dist(x[:, 1]))

    def _map(self, x: Tensor) -> Tensor:
        return as_map(x[:, self.config.prefix :], self.config.grid)

    def positions(self) -> Tensor | None:
        """The position embeddings added to the tokens, (1, N, D), placed prefix tokens first; None without any."""
        c = self.config
        if c.kind in ("learned", "patches"):
            return self.pos_embed
        if c.kind == "learned2d":
            return crossed(self.pos_row, self.pos_col)
        if c.pos == "sincos2d":
            weight = self.norm.weight
            return sincos2d(c.grid, c.width, weight.device).to(weight.dtype).unsqueeze(0)
        return None

    def stages(self) -> list[nn.Module]:
        """The token embedding, each block, the final norm with pooling, the head."""
        entry, leave, head = self._stages
        return [entry, *self.blocks, leave, *([head] if self.config.classes else [])]

    def classifiers(self) -> list[nn.Linear | nn.Conv2d]:
        return [layer for layer in (self.head, self.head_dist) if isinstance(layer, nn.Linear)]

    @classmethod
    def resized_state(
        cls, state: Mapping[str, Tensor], old: ViTConfig, new: ViTConfig, method: Interpolation
    ) -> dict[str, Tensor]:
        return resample_state(state, old.grid, new.grid, method)

    def attentions(self) -> list[AttentionLayer]:
        return attention_layers(self.encoder(), self.config.grid, self.config.patch)

    def shares(self) -> Tensor:
        c = self.config
        counts = torch.zeros(c.length)
        if c.pool in ("cls", "cls_dist", "cls_gap"):
            counts[: c.placed] = 1 / c.placed
        if c.pool not in ("cls", "cls_dist"):
            counts[c.prefix :] = 1 / (c.grid[0] * c.grid[1])
        return counts / counts.sum()

    def encoder(self) -> list[Block]:
        return [block for block in self.blocks if isinstance(block, Block)]

    def position_embeddings(self) -> list[tuple[Tensor, Grid]]:
        positions = self.positions()
        return [] if positions is None else [(positions, self.config.grid)]

    def bias_tables(self) -> dict[int, list[tuple[Tensor, Grid]]]:
        found = [block.attn.relative for block in self.encoder()]
        tables: list[tuple[Tensor, Grid]] = [(bias.table, bias.grid) for bias in found if bias is not None]
        return {1: tables} if tables else {}

    def _initialise(self) -> None:
        """As in the authors' code: Xavier for the encoder, LeCun for the patches, 0.02 for positions, zero head."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Conv2d):
                fan_in = module.weight[0].numel()
                nn.init.trunc_normal_(module.weight, std=fan_in**-0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for block in self.blocks:
            assert isinstance(block, Block)
            # q, k and v, and k and v of the pool, are stacked in one matrix; each is Xavier by itself.
            nn.init.xavier_uniform_(block.attn.qkv.weight, gain=2**0.5)
            if self.config.act == "swiglu":  # likewise the two halves of its first layer
                for part in block.mlp.fc1.weight.detach().chunk(2):
                    nn.init.xavier_uniform_(part)
            nn.init.normal_(block.mlp.fc1.bias, std=1e-6)
            nn.init.normal_(block.mlp.fc2.bias, std=1e-6)
        if self.attn_pool is not None:
            nn.init.xavier_uniform_(self.attn_pool.kv.weight, gain=1.5**0.5)
        for name, parameter in self.named_parameters():
            last = name.rpartition(".")[2]
            if last in ("pos_embed", "pos_row", "pos_col", "dist_token", "reg_token", "latent"):
                nn.init.normal_(parameter, std=0.02)
        for layer in self.classifiers():
            nn.init.zeros_(layer.weight)
