"""A backbone with a dense head: a model whose outputs keep their place in the image, for masks and boxes.

The configuration is that of the backbone and the name of the head (`models/heads`). Weights of the backbone alone, such
as those of a classifier or of pre-training, load into it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.config import Size, from_plain
from vitrail.errors import UserError
from vitrail.models.heads import HEADS
from vitrail.models.layers import Block
from vitrail.models.model import AttentionLayer, Model, ModelConfig
from vitrail.models.position import Grid, Interpolation
from vitrail.models.validate import check_classes

BACKBONE, HEAD = "backbone.", "head."  # of tensor names


@dataclass(frozen=True)
class DenseConfig(ModelConfig):
    """A backbone and a head. The fields that every model has are those of the backbone, but for the classes."""

    body: ModelConfig  # the backbone
    head: str
    classes: int
    img_size: tuple[int, int]
    channels: int
    drop: float
    drop_path: float

    def __post_init__(self) -> None:
        check_classes(self)
        if self.head not in HEADS:
            raise UserError(f"There is no dense head '{self.head}'. There are {', '.join(HEADS)}.")
        shared = {name: getattr(self, name) for name in ("img_size", "channels", "drop", "drop_path")}
        # The backbone without a head of its own, so that no parameter is left without use.
        shared |= {"head": "linear"} if "head" in {field.name for field in fields(self.body)} else {}
        object.__setattr__(self, "body", replace(self.body, classes=0, **shared))
        if reason := HEADS[self.head].misfit(self.body):
            raise UserError(f"The head {self.head} {reason}")

    @classmethod
    def of(
        cls, model: ModelConfig, heads: Sequence[str], classes: int, head: str | None = None, **changes: Any
    ) -> DenseConfig:
        """The named head, or that of a dense model, or the usual one of `heads`, on a backbone with changes."""
        body: ModelConfig = replace(model.body if isinstance(model, DenseConfig) else model, **changes)
        if head is None and isinstance(model, DenseConfig) and model.head in heads:
            head = model.head
        stages = len(body.grids) > 1
        head = head or next((name for name in heads if HEADS[name].pyramid == stages), heads[0])
        return cls(body, head, classes, body.img_size, body.channels, body.drop, body.drop_path)

    def to_plain(self) -> dict[str, Any]:
        from vitrail.models import family

        return super().to_plain() | {"body": {"family": family(self.body)} | self.body.to_plain()}

    @classmethod
    def from_plain(cls, document: dict[str, Any]) -> DenseConfig:
        from vitrail.models import FAMILIES

        inner = document.get("body")
        if not isinstance(inner, dict) or inner.get("family") not in FAMILIES:
            raise UserError(f"'body' must be the configuration of a backbone with its family, but it is {inner!r}.")
        body = FAMILIES[inner["family"]][0].from_plain({k: v for k, v in inner.items() if k != "family"})
        given = from_plain(_Fields, {k: v for k, v in document.items() if k != "body"})
        return cls(body=body, **vars(given))

    @property
    def width(self) -> int:
        return self.body.width

    @property
    def grid(self) -> Grid:
        return self.body.grid

    @property
    def grids(self) -> list[Grid]:
        return self.body.grids

    @property
    def stride(self) -> int:
        return self.body.stride

    @property
    def step(self) -> int:
        return self.body.step

    @property
    def length(self) -> int:
        return self.body.length

    @property
    def features(self) -> int:
        return self.body.features

    @property
    def resample(self) -> Interpolation:
        return self.body.resample


@dataclass(frozen=True)
class _Fields:
    """The fields of a `DenseConfig` besides the backbone, with their types."""

    head: str
    classes: int
    img_size: Size
    channels: int
    drop: float
    drop_path: float


def with_head(body: ModelConfig, heads: Sequence[str], classes: int, options: Mapping[str, Any]) -> ModelConfig:
    """A backbone with one of the heads of a task, to be trained; `options` may name it, and change the backbone."""
    config = DenseConfig.of(body, heads, classes, **options)
    if reason := HEADS[config.head].too_few(classes):
        raise UserError(f"The head {config.head} {reason}")
    return config


class Dense(Model):
    """A backbone and a dense head on its feature maps."""

    config: DenseConfig

    def __init__(self, config: DenseConfig):
        from vitrail.models import build  # it registers this family

        super().__init__()
        self.config = config
        self.backbone = build(config.body)
        self.head = HEADS[config.head](config.body, config.classes)

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.head.read(self.backbone, images))
        return outputs

    def heads(self, images: Tensor) -> tuple[Tensor, ...]:
        """The outputs, and those of auxiliary heads."""
        read = self.head.read(self.backbone, images)
        return self.head(read), *self.head.auxiliary(read)

    def embed(self, images: Tensor) -> Tensor:
        return self.backbone.embed(images)

    def features(self, images: Tensor, levels: bool = False) -> Any:
        return self.backbone.features(images, levels=levels)

    def stages(self) -> list[nn.Module]:
        """The stages of the backbone, then the head."""
        return [*self.backbone.stages(), self.head]

    def classifiers(self) -> list[nn.Linear | nn.Conv2d]:
        return []

    def filters(self) -> str:
        name = self.backbone.filters()
        return f"{BACKBONE}{name}" if name else ""

    @classmethod
    def resized_state(
        cls, state: Mapping[str, Tensor], old: DenseConfig, new: DenseConfig, method: Interpolation
    ) -> dict[str, Tensor]:
        from vitrail.models import resized_state

        body, head = (
            {n.removeprefix(part): value for n, value in state.items() if n.startswith(part)}
            for part in (BACKBONE, HEAD)
        )
        body = resized_state(body, old.body, new.body, method)
        head = HEADS[old.head].resized_state(head, old.body, new.body, method)
        return {f"{BACKBONE}{n}": value for n, value in body.items()} | {f"{HEAD}{n}": v for n, v in head.items()}

    def attentions(self) -> list[AttentionLayer]:
        return [] if self.head.adds_tokens else self.backbone.attentions()

    def shares(self) -> Tensor:
        """A dense head reads the patches alike, and no class token."""
        patches = self.config.grid[0] * self.config.grid[1]
        counts = torch.zeros(self.config.length)
        counts[-patches:] = 1 / patches
        return counts

    def shares_for(self, outputs: Tensor, classes: Tensor) -> Tensor:
        if not self.head.adds_tokens:
            return super().shares_for(outputs, classes)
        added = self.head.answering(outputs, classes)  # B Q
        return torch.cat([added.new_zeros(len(added), self.config.length), added], dim=1)

    def evidence(self, outputs: Tensor) -> Tensor:
        return self.head.evidence(outputs)

    def encoder(self) -> list[Block]:
        return [] if self.head.local else self.backbone.encoder()

    def last_map(self) -> tuple[nn.Module, int]:
        """The map that the head reads; of a plain encoder, the tokens after its final norm."""
        return (self.backbone.stages()[-1], 2) if self.backbone.encoder() else self.backbone.last_map()

    def position_embeddings(self) -> list[tuple[Tensor, Grid]]:
        return self.backbone.position_embeddings()

    def bias_tables(self) -> dict[int, list[tuple[Tensor, Grid]]]:
        return self.backbone.bias_tables()

    def mixing(self) -> list[Tensor]:
        return self.backbone.mixing()
