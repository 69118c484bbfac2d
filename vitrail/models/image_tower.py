"""Models around an image tower: what is asked about images, such as features and attention, the tower answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from torch import Tensor, nn

from vitrail.models.layers import Block
from vitrail.models.model import AttentionLayer, Model, ModelConfig
from vitrail.models.position import Grid, Interpolation
from vitrail.models.validate import check_classes

TOWER = "image."  # of tensor names
_UNSET = {"img_size": (0, 0), "channels": 0, "drop": -1.0, "drop_path": -1.0}


class ImageTowerConfig(ModelConfig):
    """Base class of configurations with an `image` tower, whose size, channels and dropout they share.

    The fields `img_size`, `channels`, `drop` and `drop_path` are the tower's unless they are given.
    """

    image: ModelConfig

    def _share(self) -> None:
        """Gives the tower the fields that are given, and this configuration those of the tower."""
        check_classes(self)
        given = {name: getattr(self, name) for name, unset in _UNSET.items() if getattr(self, name) != unset}
        tower: Any = self.image
        tower = replace(tower, classes=0, **given)
        object.__setattr__(self, "image", tower)
        for name in _UNSET:
            object.__setattr__(self, name, getattr(tower, name))

    @property
    def width(self) -> int:
        return self.image.width

    @property
    def grid(self) -> Grid:
        return self.image.grid

    @property
    def stride(self) -> int:
        return self.image.stride

    @property
    def step(self) -> int:
        return self.image.step

    @property
    def grids(self) -> list[Grid]:
        return self.image.grids

    @property
    def length(self) -> int:
        return self.image.length

    @property
    def features(self) -> int:
        return self.image.features

    @property
    def resample(self) -> Interpolation:
        return self.image.resample

    def to_plain(self) -> dict[str, Any]:
        from vitrail.models import family

        plain: Any = self
        return {**asdict(plain), "image": {"family": family(self.image), **self.image.to_plain()}}


def tower_of(values: Mapping[str, Any]) -> ModelConfig:
    """The tower's configuration, from the `image` in plain values."""
    from vitrail.models import FAMILIES

    tower = dict(values["image"])
    image: ModelConfig = FAMILIES[tower.pop("family")][0].from_plain(tower)
    return image


class ImageTower(Model):
    """Base class of models with an `image` tower."""

    image: Model

    def embed(self, images: Tensor) -> Tensor:
        return self.image.embed(images)

    def features(self, images: Tensor, levels: bool = False) -> Any:
        return self.image.features(images, levels)

    def tokens(self, images: Tensor) -> Tensor:
        return self.image.tokens(images)

    def encode(self, tokens: Tensor, keep: Tensor | None = None, norm: bool | None = None) -> Tensor:
        return self.image.encode(tokens, keep, norm)

    def filters(self) -> str:
        name = self.image.filters()
        return f"{TOWER}{name}" if name else ""

    @classmethod
    def resized_state(cls, state: Mapping[str, Tensor], old: Any, new: Any, method: Interpolation) -> dict[str, Tensor]:
        from vitrail.models import resized_state

        tower = {name.removeprefix(TOWER): value for name, value in state.items() if name.startswith(TOWER)}
        resized = resized_state(tower, old.image, new.image, method)
        return dict(state) | {f"{TOWER}{name}": value for name, value in resized.items()}

    def attentions(self) -> list[AttentionLayer]:
        return self.image.attentions()

    def shares(self) -> Tensor:
        return self.image.shares()

    def encoder(self) -> list[Block]:
        return self.image.encoder()

    def last_map(self) -> tuple[nn.Module, int]:
        return self.image.last_map()

    def position_embeddings(self) -> list[tuple[Tensor, Grid]]:
        return self.image.position_embeddings()

    def bias_tables(self) -> dict[int, list[tuple[Tensor, Grid]]]:
        return self.image.bias_tables()

    def mixing(self) -> list[Tensor]:
        return self.image.mixing()
