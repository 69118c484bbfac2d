"""The contract of every model: what the rest of the package asks of one, whatever its family.

A family is a frozen dataclass and a module, in one file: `ModelConfig` and `Model` say what they must have, and what
they get if they do not say otherwise. No family inherits from another.

Legend: B batch, N tokens, D width, F features, H heads, K classes, (h, w) the last map.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, overload

import torch
from torch import Tensor, nn

from vitrail.errors import UserError
from vitrail.models.layers import Block
from vitrail.models.position import Grid, Interpolation


class ModelConfig:
    """What the configuration of every family has, as fields or as properties."""

    if TYPE_CHECKING:  # at run time they would be defaults of the fields
        __dataclass_fields__: ClassVar[dict[str, Any]]

        @property
        def img_size(self) -> Grid: ...
        @property
        def channels(self) -> int: ...
        @property
        def classes(self) -> int: ...  # 0 is a body without a head
        @property
        def drop(self) -> float: ...
        @property
        def drop_path(self) -> float: ...
        @property
        def width(self) -> int: ...  # of the last map
        @property
        def grid(self) -> Grid: ...  # rows and columns of the last map
        @property
        def stride(self) -> int: ...  # pixels from one place of the last map to the next

    @property
    def step(self) -> int:
        """What the sides of the images must be multiples of."""
        return 1

    @property
    def grids(self) -> list[Grid]:
        """Rows and columns of the map of each stage; a model without a pyramid has one."""
        return [self.grid]

    @property
    def length(self) -> int:
        """Tokens of the last stage: its places, after the class token and the like."""
        return self.grid[0] * self.grid[1]

    @property
    def features(self) -> int:
        """The length of the vector that `embed` gives for an image."""
        return self.width


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """A layer that attends, and where in the image its tokens lie. Tokens that are no patch come first."""

    module: Any  # has `heads`, and `weights(*inputs)`: its map, (B, H, N, M), or (B, W, H, n, n) of windows
    grid: Grid  # of patches
    pixels: int  # from one patch to the next
    areas: Tensor | None = None  # M h·w: which patches each key is made of, in shares; None if the tokens are the keys
    window: int = 0  # tokens of a side, where tokens attend within windows
    shift: Grid = (0, 0)  # of the windows


class Model(nn.Module):
    """What every model has: `config`, `embed`, `features`, `forward` and `stages`. The rest has a default."""

    config: ModelConfig

    # To be computed -----------------------------------------------------------------------------------------

    def forward(self, images: Tensor) -> Tensor:
        """The outputs of the head, (B, K); of a body without a head, its features, (B, F)."""
        raise NotImplementedError

    def embed(self, images: Tensor) -> Tensor:
        """One feature vector per image: (B, F)."""
        raise NotImplementedError

    @overload
    def features(self, images: Tensor, levels: Literal[False] = False) -> Tensor: ...
    @overload
    def features(self, images: Tensor, levels: Literal[True]) -> list[Tensor]: ...
    @overload
    def features(self, images: Tensor, levels: bool) -> Tensor | list[Tensor]: ...

    def features(self, images: Tensor, levels: bool = False) -> Tensor | list[Tensor]:
        """The last map, (B, D, h, w); with `levels` all maps that dense heads read, from fine to coarse, it last."""
        raise NotImplementedError

    def stages(self) -> list[nn.Module]:
        """The model from input to output: what enters, each block, the last norm, and the head if there is one.

        Each stage is called once in a forward pass, and each parameter is in one stage. So a stage is the unit of
        layer-wise learning rates, freezing, activation checkpointing and FSDP.
        """
        raise NotImplementedError

    def heads(self, images: Tensor) -> tuple[Tensor, ...]:
        """What each head says, (B, K) each: one, or two with DeiT's distillation token."""
        return (self(images),)

    # What it is made of -------------------------------------------------------------------------------------

    @property
    def stride(self) -> int:
        """Pixels from one place of the last map to the next."""
        return self.config.stride

    def classifiers(self) -> list[nn.Linear | nn.Conv2d]:
        """The last layers, which have a row for each class: one for each head, none in a body without a head."""
        if not self.config.classes:
            return []
        return [layer for layer in self.stages()[-1].modules() if isinstance(layer, nn.Linear | nn.Conv2d)][-1:]

    def filters(self) -> str:
        """The name of the weights that read the image: those of the first convolution."""
        return next(f"{name}.weight" for name, module in self.named_modules() if isinstance(module, nn.Conv2d))

    @classmethod
    def resized_state(
        cls,
        state: Mapping[str, Tensor],
        old: Any,  # noqa: ARG003  # most families know no places
        new: Any,  # noqa: ARG003
        method: Interpolation,  # noqa: ARG003
    ) -> dict[str, Tensor]:
        """A copy of the weights that fits another image size; what need not change is the same tensor."""
        return dict(state)

    # What can be explained ----------------------------------------------------------------------------------

    def attentions(self) -> list[AttentionLayer]:
        """The layers that attend, from input to output."""
        return []

    def shares(self) -> Tensor:
        """How much each token of the last stage counts for what the head reads: (N,), adds up to one.

        Attention pooling decides by itself: its patches count alike here.
        """
        patches = self.config.grid[0] * self.config.grid[1]
        prefix = self.config.length - patches
        counts = torch.zeros(self.config.length)
        counts[: prefix or None] = 1 / (prefix or patches)
        return counts / counts.sum()

    def encoder(self) -> list[Block]:
        """The blocks of a plain transformer encoder, through which relevance is followed; none in other models."""
        return []

    def last_map(self) -> tuple[nn.Module, int]:
        """The module that gives the last map from which the classes are read, or its tokens, and its channel axis.

        Where there is no `encoder`, relevance is that map times its gradient.
        """
        raise UserError(f"Relevance cannot be drawn: a {type(self).__name__} does not say which map its head reads.")

    def position_embeddings(self) -> list[tuple[Tensor, Grid]]:
        """The embeddings of places, (1, N, D), those of patches last, with their grid: of each stage that has them."""
        return []

    def bias_tables(self) -> dict[int, list[tuple[Tensor, Grid]]]:
        """The learned biases of offsets, (offsets, H), with the grid that they lie in: by stage, from 1."""
        return {}

    def mixing(self) -> list[Tensor]:
        """The weights that the hidden units of each layer that mixes tokens give to these: (U, N) each."""
        return []
