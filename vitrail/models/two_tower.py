"""Two towers for images and texts, with one joint space: CLIP (https://arxiv.org/abs/2103.00020) and SigLIP
(https://arxiv.org/abs/2303.15343). Any model of ours is the image tower; LiT (https://arxiv.org/abs/2111.07991) is one
with trained weights that stay as they are.

The features of both towers are projected and scaled to unit length. Their dot product times a learned scale, plus
SigLIP's learned bias, says how well an image and a text match.

`forward` returns the embeddings of images, as `embed_text` does of texts. What is asked about images, such as features
and attention, the image tower answers.

Legend: B batch, N tokens, D width, F features, J dimensions of the joint space.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import coerce, from_plain
from vitrail.errors import UserError
from vitrail.models.image_tower import ImageTower, ImageTowerConfig, tower_of
from vitrail.models.layers import Stage
from vitrail.models.model import ModelConfig
from vitrail.models.position import Grid
from vitrail.models.text import TextConfig, TextTower

LARGEST_SCALE = 100.0  # of CLIP's logits


@dataclass(frozen=True)
class TwoTowerConfig(ImageTowerConfig):
    image: ModelConfig  # the image tower, without a head
    text: TextConfig
    classes: int = 512  # dimensions of the joint space, J
    project: bool = True  # a projection of image features; without one, they have J dimensions, as in SigLIP
    bias: bool = True  # SigLIP's: a learned bias of the logits, and one of the text projection
    img_size: Grid = (0, 0)  # by default the tower's own, as are the next three
    channels: int = 0
    drop: float = -1.0
    drop_path: float = -1.0

    def __post_init__(self) -> None:
        self._share()
        if not self.project and self.features != self.classes:
            raise UserError(
                f"Without a projection, the joint space has the tower's {self.features} features, but 'classes' is "
                f"{self.classes}."
            )

    @classmethod
    def from_plain(cls, document: dict[str, Any]) -> TwoTowerConfig:
        rest = {name: coerce(cls, name, value) for name, value in document.items() if name not in ("image", "text")}
        return cls(image=tower_of(document), text=from_plain(TextConfig, document["text"]), **rest)


class TwoTower(ImageTower):
    config: TwoTowerConfig
    reads_text = True

    def __init__(self, config: TwoTowerConfig):
        from vitrail.models import build

        super().__init__()
        c = self.config = config
        self.image = build(c.image)
        self.image_proj = nn.Linear(c.features, c.classes, bias=False) if c.project else nn.Identity()
        self.text = TextTower(c.text)
        self.text_proj = nn.Linear(c.text.width, c.classes, bias=c.bias)
        # Vectors of one number, not scalars, which FSDP2 cannot shard.
        self.logit_scale = nn.Parameter(torch.tensor([math.log(10.0 if c.bias else 1 / 0.07)]))
        self.logit_bias = nn.Parameter(torch.tensor([-10.0])) if c.bias else None
        self._stages = (
            Stage(self, self._project, [self.image_proj]),
            Stage(self, self.text.tokens, [self.text.token_embed], ["text.pos_embed"]),
            Stage(self, self._read, [self.text.norm, self.text_proj], ["logit_scale"] + ["logit_bias"] * c.bias),
        )
        if not self.logit_scale.is_meta:
            for layer in (self.image_proj, self.text_proj):
                if isinstance(layer, nn.Linear):
                    nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
            if self.text_proj.bias is not None:
                nn.init.zeros_(self.text_proj.bias)

    def forward(self, images: Tensor) -> Tensor:
        """The embeddings of images, of unit length: (B, J)."""
        joint: Tensor = self._stages[0](self.image.embed(images))
        return joint

    def embed_text(self, tokens: Tensor) -> Tensor:
        """The embeddings of texts, of unit length, from their token ids, (B, N): (B, J)."""
        x = self._stages[1](tokens)
        keep = torch.arange(x.shape[1], device=x.device)
        for block in self.text.blocks:
            x = block(x, keep)
        joint: Tensor = self._stages[2](x, tokens)
        return joint

    def match(self, images: Tensor, texts: Tensor) -> Tensor:
        """How well each image matches each text, as logits, from their embeddings, (B, J) and (C, J): (B, C)."""
        logits = self.logit_scale.exp() * images @ texts.T
        return logits if self.logit_bias is None else logits + self.logit_bias

    def stages(self) -> list[nn.Module]:
        """Those of the image tower, its projection, then those of the text tower."""
        project, enter, read = self._stages
        own = [project] if self.config.project else []
        return [*self.image.stages(), *own, enter, *self.text.blocks, read]

    def classifiers(self) -> list[nn.Linear | nn.Conv2d]:
        return []

    def image_stages(self) -> int:
        """The number of stages of the image tower, which `--freeze image` freezes."""
        return len(self.image.stages())

    def _project(self, features: Tensor) -> Tensor:
        return F.normalize(self.image_proj(features), dim=1)

    def _read(self, x: Tensor, tokens: Tensor) -> Tensor:
        return F.normalize(self.text_proj(self.text.pooled(x, tokens)), dim=1)


def two_towers(body: ModelConfig, vocab: int, length: int, bias: bool, changes: Mapping[str, Any]) -> ModelConfig:
    """An image tower with changes and a new text tower of its size; trained towers keep their text tower."""
    from vitrail.models import backbone

    tower: Any = backbone(body)
    image = replace(tower, classes=0, **changes)
    if isinstance(body, TwoTowerConfig):
        return replace(body, image=image, img_size=image.img_size, channels=image.channels)
    text = text_tower(image.features, vocab, length)
    return TwoTowerConfig(image, text, joint_size(image.features), bias=bias)


def joint_size(features: int) -> int:
    """The dimensions of the joint space, for an image tower with this many features."""
    return min(max(features, 64), 512)


def text_tower(features: int, vocab: int, length: int) -> TextConfig:
    """A text tower to go with an image tower: CLIP's with up to 512 channels, or a small one for a small tower."""
    if features < 384:
        return TextConfig(128, 4, 4, 512, vocab, length)
    width = min(features // 64 * 64, 512)
    return TextConfig(width, 12, width // 64, 4 * width, vocab, length)


def clip(image: ModelConfig, width: int, joint: int, vocab: int = 49_408, length: int = 77) -> TwoTowerConfig:
    """CLIP: a text tower of 12 blocks; the numerics of the image tower."""
    numerics: Any = image
    text = TextConfig(width, 12, width // 64, 4 * width, vocab, length, act=numerics.act, eps=numerics.eps)
    return TwoTowerConfig(image, text, joint, bias=False)


def siglip(image: ModelConfig, vocab: int = 32_000, length: int = 64) -> TwoTowerConfig:
    """SigLIP: attention pooling instead of a projection, and a text tower as large as the image tower."""
    tower: Any = image
    sizes = tower.width, tower.depth, tower.heads, tower.mlp
    text = TextConfig(*sizes, vocab, length, causal=False, pool="last", act=tower.act, eps=tower.eps)
    return TwoTowerConfig(image, text, image.features, project=False)
