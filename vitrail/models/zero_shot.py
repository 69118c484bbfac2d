"""An image classifier made of words: the image tower of a model for images and texts, and one text per class.

Once texts are embedded, their embeddings are the rows of a linear layer on the embedding of the image, so the text
tower is not needed any more.

Legend: B batch, F features, J dimensions of the joint space, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import coerce
from vitrail.models.image_tower import ImageTower, ImageTowerConfig, tower_of
from vitrail.models.layers import Stage
from vitrail.models.model import Model, ModelConfig
from vitrail.models.position import Grid
from vitrail.models.two_tower import TwoTower


@dataclass(frozen=True)
class ZeroShotConfig(ImageTowerConfig):
    image: ModelConfig  # the image tower, without a head
    joint: int  # dimensions of the joint space, J
    classes: int
    project: bool = True
    img_size: Grid = (0, 0)  # by default the tower's own, as are the next three
    channels: int = 0
    drop: float = -1.0
    drop_path: float = -1.0

    def __post_init__(self) -> None:
        self._share()

    @classmethod
    def from_plain(cls, document: dict[str, Any]) -> ZeroShotConfig:
        rest = {name: coerce(cls, name, value) for name, value in document.items() if name != "image"}
        return cls(image=tower_of(document), **rest)


class ZeroShot(ImageTower):
    config: ZeroShotConfig

    def __init__(self, config: ZeroShotConfig):
        from vitrail.models import build

        super().__init__()
        c = self.config = config
        self.image = build(c.image)
        self.image_proj = nn.Linear(c.features, c.joint, bias=False) if c.project else nn.Identity()
        self.head = nn.Linear(c.joint, c.classes)
        self._project_stage = Stage(self, self._project, [self.image_proj])

    @classmethod
    def of(cls, towers: TwoTower, texts: Tensor) -> ZeroShot:
        """A classifier by the embeddings of its classes, of unit length, (K, J). Weights are shared."""
        c = towers.config
        with torch.device("meta"):
            model = cls(ZeroShotConfig(c.image, c.classes, len(texts), c.project))
        model.image, model.image_proj = towers.image, towers.image_proj
        bias = torch.zeros(len(texts)) if towers.logit_bias is None else towers.logit_bias.detach().expand(len(texts))
        model.head.weight = nn.Parameter(towers.logit_scale.detach().exp() * texts)
        model.head.bias = nn.Parameter(bias.to(texts).clone())
        model._project_stage = Stage(model, model._project, [model.image_proj])
        return model.eval()

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self._project_stage(self.image.embed(images)))
        return logits

    def stages(self) -> list[nn.Module]:
        own = [self._project_stage] if self.config.project else []
        return [*self.image.stages(), *own, self.head]

    def _project(self, features: Tensor) -> Tensor:
        return F.normalize(self.image_proj(features), dim=1)


def word_classifier(towers: Model, texts: Tensor) -> Model:
    """A classifier of a model with two towers, by the embeddings of its labels, (K, J)."""
    assert isinstance(towers, TwoTower)
    return ZeroShot.of(towers, texts.to(towers.logit_scale))
