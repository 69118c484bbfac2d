"""The contract of dense heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vitrail.models.layers import Levels
from vitrail.models.model import Model, ModelConfig
from vitrail.models.position import Interpolation


class Head(nn.Module):
    """Base class of dense heads, built from the configuration of a backbone and the number of classes, K."""

    title: ClassVar[str]  # in words, for errors and docs
    adds_tokens: ClassVar[bool] = False  # whether it adds tokens to the sequence of the backbone, at its end
    local: ClassVar[bool] = False  # whether explanations are of one place: of the strongest box
    # Whether it reads all feature maps that the backbone offers, finest first; or those after shares of the depth.
    levels: ClassVar[Levels] = False

    pyramid: ClassVar[bool] = False  # whether it is the usual choice for a backbone of several stages

    def __init__(self, body: ModelConfig, classes: int):  # noqa: ARG002  # of subclasses
        super().__init__()

    @classmethod
    def misfit(cls, body: ModelConfig) -> str:  # noqa: ARG003
        """Why the head cannot be built on a backbone: "needs …"; empty if it can."""
        return ""

    @classmethod
    def too_few(cls, classes: int) -> str:  # noqa: ARG003
        """Why the head cannot learn this number of classes: "needs …"; empty if it can."""
        return ""

    def read(self, backbone: Model, images: Tensor) -> Any:
        """What the head reads from the backbone: by default its feature maps."""
        features: Callable[..., Any] = backbone.features  # of plain encoders, which alone have shares
        return features(images, levels=self.levels)

    def forward(self, read: Any) -> Tensor:
        """The outputs, (B, K, h, w) for masks, at the head's own resolution."""
        raise NotImplementedError

    def auxiliary(self, read: Any) -> tuple[Tensor, ...]:  # noqa: ARG002
        """Outputs that only training needs, for auxiliary losses."""
        return ()

    def evidence(self, outputs: Tensor) -> Tensor:
        """The outputs that explanations are of: all, or one number per class, (B, K)."""
        return outputs

    def answering(self, outputs: Tensor, classes: Tensor) -> Tensor:
        """The weight of each token that the head adds in the logits of these classes, (B,): (B, Q)."""
        raise NotImplementedError

    @classmethod
    def resized_state(
        cls,
        state: Mapping[str, Tensor],
        old: ModelConfig,  # noqa: ARG003  # most heads have no position embeddings
        new: ModelConfig,  # noqa: ARG003
        method: Interpolation,  # noqa: ARG003
    ) -> dict[str, Tensor]:
        """The tensors of the head for a backbone of another image size."""
        return dict(state)


def level_widths(body: ModelConfig, levels: Levels = True) -> list[int]:
    """The channels of each feature map that `features` returns for these levels, finest first."""
    from vitrail.models import build  # it imports the heads

    with torch.device("meta"):
        features: Callable[..., list[Tensor]] = build(body).eval().features
        maps = features(torch.empty(1, body.channels, *body.img_size), levels=levels)
    return [level.shape[1] for level in maps]
