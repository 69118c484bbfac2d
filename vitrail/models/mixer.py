"""MLP-Mixer: "MLP-Mixer: An all-MLP Architecture for Vision", https://arxiv.org/abs/2105.01601.

An image is cut into patches as for a ViT, but without attention: alternating MLPs mix the tokens of each channel and
the channels of each token. The first is shared over channels, the second over tokens:

    U = X + W2·gelu(W1·LN(X))        along the tokens   (1)  `mlp_tokens`
    Y = U + W4·gelu(W3·LN(U))        along the channels (1)  `mlp_channels`

Token mixing has a weight for every token, so a Mixer has a fixed image size and its weights cannot be resampled. For
the same reason it needs no position embeddings.

Differences from the paper: none. Initialisation follows the authors' JAX code.

Legend: B batch, N tokens, D width, K classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from vitrail.errors import UserError
from vitrail.models.layers import DropPath, Levels, Mlp, as_map, head_of, level_depths
from vitrail.models.model import Model, ModelConfig
from vitrail.models.position import Grid, Interpolation
from vitrail.models.validate import check_counts, check_images, check_multiple, check_rates
from vitrail.models.vit import PatchEmbed


@dataclass(frozen=True)
class MixerConfig(ModelConfig):
    width: int  # of the tokens
    depth: int  # blocks
    mlp_tokens: int  # hidden units of the token-mixing MLPs
    mlp_channels: int  # hidden units of the channel-mixing MLPs
    patch: int
    img_size: tuple[int, int] = (224, 224)
    channels: int = 3
    classes: int = 1000
    drop: float = 0.0
    drop_path: float = 0.0
    act: Literal["gelu", "gelu_tanh"] = "gelu"  # the authors' JAX code has the latter

    def __post_init__(self) -> None:
        check_counts(self, "width", "depth", "mlp_tokens", "mlp_channels", "patch")
        check_rates(self)
        check_multiple(self, self.patch, "the patch size")

    @property
    def grid(self) -> Grid:
        """Rows and columns of patches."""
        return self.img_size[0] // self.patch, self.img_size[1] // self.patch

    @property
    def stride(self) -> int:
        """Pixels per patch."""
        return self.patch

    @property
    def step(self) -> int:
        """The image sides must be multiples of this."""
        return self.patch


# Table 1 of the paper, and our own nano for images of 28 to 64 pixels.
CONFIGS = {
    "mixer_nano": MixerConfig(128, 6, 64, 512, 4, (32, 32)),
    "mixer_s16": MixerConfig(512, 8, 256, 2048, 16),
    "mixer_s32": MixerConfig(512, 8, 256, 2048, 32),
    "mixer_b16": MixerConfig(768, 12, 384, 3072, 16),
    "mixer_b32": MixerConfig(768, 12, 384, 3072, 32),
    "mixer_l16": MixerConfig(1024, 24, 512, 4096, 16),
    "mixer_l32": MixerConfig(1024, 24, 512, 4096, 32),
    "mixer_h14": MixerConfig(1280, 32, 640, 5120, 14),
}


class MixerBlock(nn.Module):
    """Token mixing, then channel mixing: equation 1."""

    def __init__(self, c: MixerConfig, drop_path: float):
        super().__init__()
        self.norm1 = nn.LayerNorm(c.width, eps=1e-6)
        self.mlp_tokens = Mlp(c.length, c.mlp_tokens, c.drop, c.act)
        self.norm2 = nn.LayerNorm(c.width, eps=1e-6)
        self.mlp_channels = Mlp(c.width, c.mlp_channels, c.drop, c.act)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.mlp_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2))
        return x + self.drop_path(self.mlp_channels(self.norm2(x)))


class Mixer(Model):
    config: MixerConfig

    def __init__(self, config: MixerConfig):
        super().__init__()
        c = self.config = config
        self.stem = PatchEmbed(c.channels, c.width, c.patch)
        self.blocks = nn.ModuleList(MixerBlock(c, c.drop_path * i / max(c.depth - 1, 1)) for i in range(c.depth))
        self.norm = nn.LayerNorm(c.width, eps=1e-6)
        self.head = head_of(c.width, c.classes)
        if not self.norm.weight.is_meta:
            self._initialise()

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.embed(images))  # B K

    def embed(self, images: Tensor) -> Tensor:
        """One feature vector per image, the average of its tokens: (B, D)."""
        return self._mixed(images)[-1].mean(dim=1)

    def features(self, images: Tensor, levels: Levels = False) -> Any:
        """The patch tokens after the final norm as a map, (B, D, h, w); with `levels`, also after earlier blocks.

        All levels have the same stride; only the last is normalised.
        """
        taps = level_depths(self.config.depth, levels)[:-1] if levels else []
        maps = [as_map(x, self.config.grid) for x in self._mixed(images, taps)]
        return maps if levels else maps[-1]

    def _mixed(self, images: Tensor, taps: Sequence[int] = ()) -> list[Tensor]:
        """The tokens after each number of blocks in `taps`, then after the final norm: (B, N, D)."""
        check_images(images, self.config)
        x, found = self.stem(images), []
        for depth, block in enumerate(self.blocks, start=1):
            x = block(x)
            if depth in taps:
                found.append(x)
        return [*found, self.norm(x)]

    def stages(self) -> list[nn.Module]:
        """The patch embedding, each block, the final norm, the head."""
        return [self.stem, *self.blocks, self.norm, *([self.head] if self.config.classes else [])]

    @classmethod
    def resized_state(
        cls,
        state: Mapping[str, Tensor],
        old: MixerConfig,
        new: MixerConfig,
        method: Interpolation,  # noqa: ARG003
    ) -> dict[str, Tensor]:
        if old.grid != new.grid:
            h, w = old.img_size
            raise UserError(
                f"A Mixer has a weight for every patch, so its image size must stay {h}x{w}, but it is "
                f"{new.img_size[0]}x{new.img_size[1]}. Keep the size, or train a new model."
            )
        return dict(state)

    def last_map(self) -> tuple[nn.Module, int]:
        return self.norm, -1

    def mixing(self) -> list[Tensor]:
        return [block.mlp_tokens.fc1.weight for block in self.blocks if isinstance(block, MixerBlock)]

    def _initialise(self) -> None:
        """As in the authors' code: LeCun for patches and MLPs, zero head."""
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                nn.init.trunc_normal_(module.weight, std=module.weight[0].numel() ** -0.5)
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]  # all of them have one
        for layer in self.classifiers():
            nn.init.zeros_(layer.weight)
