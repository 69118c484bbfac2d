"""The model contract: `ModelConfig` and `Model`, the base classes of every family.

A family is one file with a configuration, a frozen dataclass derived from `ModelConfig`, and a module derived from
`Model`. The base classes define what the rest of the package relies on, with defaults where there is a sensible one. No
family inherits from another.

Legend: B batch, N tokens, D width, F features, H heads, K classes, (h, w) last feature map.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, overload

import torch
from torch import Tensor, nn

from vitrail.config import from_plain
from vitrail.errors import UserError
from vitrail.models.layers import Block
from vitrail.models.patterns import Pattern
from vitrail.models.position import Grid, Interpolation


class ModelConfig:
    """Base class of model configurations.

    A subclass is a frozen dataclass with at most 12 fields besides these. It defines, as fields or properties:

    - `img_size`: height and width of the input images in pixels.
    - `channels`: input channels.
    - `classes`: outputs of the head, K; 0 builds a headless model (backbone).
    - `drop`, `drop_path`: rates of dropout and stochastic depth.
    - `width`: channels of the last feature map, D.
    - `grid`: rows and columns of the last feature map, (h, w).
    - `stride`: input pixels per position of the last feature map.

    Three more fields have values that no tensor shows: `eps`, the epsilon of the LayerNorms, `resample`, the way
    position embeddings are resampled, and `attention`, the pattern of a ViT-like model.
    """

    if TYPE_CHECKING:  # at run time, dataclasses would take these properties for defaults
        __dataclass_fields__: ClassVar[dict[str, Any]]

        @property
        def img_size(self) -> Grid: ...
        @property
        def channels(self) -> int: ...
        @property
        def classes(self) -> int: ...
        @property
        def drop(self) -> float: ...
        @property
        def drop_path(self) -> float: ...
        @property
        def width(self) -> int: ...
        @property
        def grid(self) -> Grid: ...
        @property
        def stride(self) -> int: ...

    def to_plain(self) -> dict[str, Any]:
        """The fields as plain values, for a model card."""
        return asdict(self)

    @classmethod
    def from_plain(cls, document: dict[str, Any]) -> ModelConfig:
        """The inverse of `to_plain`; raises UserError for unknown, missing or ill-typed values."""
        return from_plain(cls, document)

    @property
    def resample(self) -> Interpolation:
        """How position embeddings are resampled at another image size."""
        return "bicubic"

    @property
    def step(self) -> int:
        """The image sides must be multiples of this."""
        return 1

    @property
    def grids(self) -> list[Grid]:
        """Rows and columns of the feature map of each stage, or of the only one."""
        return [self.grid]

    @property
    def length(self) -> int:
        """Tokens of the last stage, N: prefix tokens, such as the class token, and one per position of `grid`."""
        return self.grid[0] * self.grid[1]

    @property
    def features(self) -> int:
        """The length of the feature vector that `embed` returns, F."""
        return self.width


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """An attention layer, and where its tokens lie in the image. Prefix tokens come before patches."""

    module: Any  # has `heads` and `weights(*inputs)`: (B, H, N, M), or (B, W, H, n, n) for windows
    grid: Grid  # rows and columns of patches
    pixels: int  # per patch
    areas: Tensor | None = None  # (M, h·w): the share of each patch in each key; None if tokens are keys
    window: int = 0  # tokens per side of a window; 0 for global attention
    shift: Grid = (0, 0)  # of the windows, in tokens
    pattern: Pattern | None = None  # of the patches; None for global attention


def attention_layers(blocks: list[Block], grid: Grid, pixels: int) -> list[AttentionLayer]:
    """The attention layers of a plain transformer encoder."""
    return [AttentionLayer(block.attn, grid, pixels, pattern=block.attn.pattern) for block in blocks]


class Model(nn.Module):
    """Base class of models.

    A subclass sets `config` and implements `forward`, `embed`, `features` and `stages`. The other methods have
    defaults: those under "Explanations" return nothing unless the architecture supports them.
    """

    config: ModelConfig
    card: Any = None  # of a loaded model, its `weights.Card`: what its outputs mean, and the preprocessing of its input
    reads_text: ClassVar[bool] = False  # has a text tower, with `embed_text`
    patchwise: ClassVar[bool] = False  # one token per image patch, so that `encode` can leave out masked patches

    # To implement -------------------------------------------------------------------------------------------

    def forward(self, images: Tensor) -> Tensor:
        """The logits, (B, K); without a head, the features, (B, F)."""
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
        """The last feature map, (B, D, h, w); with `levels`, all feature maps that dense heads read, finest first."""
        raise NotImplementedError

    def stages(self) -> list[nn.Module]:
        """The model in order: input embedding, each block, final norm, head if there is one.

        Each stage is called once per forward pass, and each parameter belongs to exactly one stage: stages are the
        units of layer-wise learning rates, freezing, activation checkpointing and FSDP.
        """
        raise NotImplementedError

    def heads(self, images: Tensor) -> tuple[Tensor, ...]:
        """The logits of each head, (B, K): one head, or two with DeiT's distillation token."""
        return (self(images),)

    def embed_text(self, tokens: Tensor) -> Tensor:  # noqa: ARG002
        """The embeddings of texts, in the space of the outputs, from their token ids, (B, N): (B, K)."""
        raise UserError(f"A {type(self).__name__} reads no texts.")

    def evidence(self, outputs: Tensor) -> Tensor:
        """The outputs that explanations are of: the logits, (B, K), or for masks those of every place."""
        return outputs

    # Tokens -------------------------------------------------------------------------------------------------

    def tokens(self, images: Tensor) -> Tensor:  # noqa: ARG002
        """The encoder's input, position embeddings added: (B, N, D)."""
        raise UserError(f"A {type(self).__name__} has no token sequence.")

    def encode(
        self,
        tokens: Tensor,  # noqa: ARG002
        keep: Tensor | None = None,  # noqa: ARG002
        norm: bool | None = None,  # noqa: ARG002
    ) -> Tensor:
        """The encoder's output, (B, N, D), or that of the tokens with indices `keep`, (n,) or (B, n).

        `norm` forces or leaves out the final LayerNorm; by default it is applied unless it belongs to the pooling.
        """
        raise UserError(f"A {type(self).__name__} has no token sequence.")

    # Structure ----------------------------------------------------------------------------------------------

    @property
    def stride(self) -> int:
        """Input pixels per position of the last feature map."""
        return self.config.stride

    def classifiers(self) -> list[nn.Linear | nn.Conv2d]:
        """The final layer of each head, with one row per class; empty for a headless model."""
        if not self.config.classes:
            return []
        return [layer for layer in self.stages()[-1].modules() if isinstance(layer, nn.Linear | nn.Conv2d)][-1:]

    def image_stages(self) -> int:
        """The number of stages of the image tower, which come first, of a model that has a text tower."""
        raise UserError(
            "--freeze image applies to a model with a text tower, for images with captions. Use --freeze all."
        )

    def filters(self) -> str:
        """The parameter name of the filters applied to the image: the first convolution's weight; empty without one."""
        names = (f"{name}.weight" for name, module in self.named_modules() if isinstance(module, nn.Conv2d))
        return next(names, "")

    @classmethod
    def resized_state(
        cls,
        state: Mapping[str, Tensor],
        old: Any,  # noqa: ARG003  # most families have no position embeddings
        new: Any,  # noqa: ARG003
        method: Interpolation,  # noqa: ARG003
    ) -> dict[str, Tensor]:
        """A copy of a state dict for another image size. Tensors that need no change are shared, not copied."""
        return dict(state)

    # Explanations -------------------------------------------------------------------------------------------

    def attentions(self) -> list[AttentionLayer]:
        """The attention layers, from input to output."""
        return []

    def shares(self) -> Tensor:
        """The weight of each token of the last stage in the pooled features: (N,), sums to 1.

        Attention pooling weighs tokens by content; here its patches have equal weights.
        """
        patches = self.config.grid[0] * self.config.grid[1]
        prefix = self.config.length - patches
        counts = torch.zeros(self.config.length)
        counts[: prefix or None] = 1 / (prefix or patches)
        return counts / counts.sum()

    def shares_for(self, outputs: Tensor, classes: Tensor) -> Tensor:  # noqa: ARG002  # of models with several answers
        """The weight of each token of the last stage in the logits of these classes, (B,): (B, N)."""
        return self.shares().expand(len(classes), -1)

    def encoder(self) -> list[Block]:
        """The blocks of a plain transformer encoder, for attention-based relevance; empty for other models."""
        return []

    def last_map(self) -> tuple[nn.Module, int]:
        """The module whose output, a feature map or tokens, the head reads, and the channel axis of that output.

        Without an `encoder`, relevance is this output times its gradient.
        """
        raise UserError(f"Relevance is not available: {type(self).__name__} does not define 'last_map'.")

    def position_embeddings(self) -> list[tuple[Tensor, Grid]]:
        """The position embeddings, (1, N, D), patches last, with their grid, of each stage that has them."""
        return []

    def bias_tables(self) -> dict[int, list[tuple[Tensor, Grid]]]:
        """The relative position biases, (offsets, H), with their grid, by stage, counted from 1."""
        return {}

    def mixing(self) -> list[Tensor]:
        """The first weight matrix of each token-mixing layer: (hidden units, N)."""
        return []
