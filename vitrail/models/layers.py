"""Layers that the models share: attention, MLPs, the pre-norm block, regularisation.

Legend: B batch, N tokens, D width, H heads. Parameter names follow timm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.models.position import Grid, RelativeBias
from vitrail.world import world

if TYPE_CHECKING:  # patterns need `attend`
    from vitrail.models.patterns import Pattern

# The paper's GELU; its tanh approximation, as in JAX; CLIP's x·sigmoid(1.702·x); a gated MLP.
Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "swiglu"]

QUARTERS = (Fraction(1, 4), Fraction(1, 2), Fraction(3, 4))
Levels = bool | tuple[Fraction, ...]  # feature maps to return: the last only, all, or those after shares of the depth


class Attention(nn.Module):
    """Multi-head self-attention (appendix A), through the fused kernel of the device."""

    def __init__(
        self,
        width: int,
        heads: int,
        drop: float = 0.0,
        relative: RelativeBias | None = None,
        pattern: Pattern | None = None,
    ):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.drop = Dropout(drop)
        self.relative = relative
        self.pattern = pattern  # None for global attention

    def forward(self, x: Tensor, keep: Tensor | None = None, first: int | None = None) -> Tensor:
        """`keep` holds the indices of the tokens in `x`, (N,) or (B, N), if `x` is a subset of the sequence.

        With `first`, only the outputs of the first tokens are computed, which attend globally in every pattern.
        """
        q, k, v = self._split(x)
        bias = self._bias(q, keep)
        if first is not None:
            q, bias = q[:, :, :first], None if bias is None else bias[..., :first, :]
        local = self.pattern is not None and first is None
        y = self.pattern(q, k, v, bias, keep) if local else attend(q, k, v, bias)  # type: ignore[misc]
        return self.drop(self.proj(y.transpose(1, 2).flatten(2)))  # B N D

    def weights(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        """The attention weights that `forward` applies to the same input but does not materialise: (B, H, N, N)."""
        q, k, _ = self._split(x)
        logits = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        bias = self._bias(q, keep)
        logits = logits if bias is None else logits + bias
        return logits.softmax(dim=-1) if self.pattern is None else self.pattern.weights(logits, keep)

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # Views of one matrix, in this order: the backward pass stacks the three gradients into the gradient of the
        # matrix without another copy, which makes training 1.03 times as fast.
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).unbind(2)  # B N H D/H
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _bias(self, like: Tensor, keep: Tensor | None) -> Tensor | None:
        return None if self.relative is None else self.relative(keep).to(like.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """softmax(q·kᵀ / √d + bias)·v through the fused kernel of the device, which never holds the N×N matrix.

    A boolean `bias` is a mask: pairs where it is false do not attend.

    On CPUs it trains in fp32 even under bf16 autocast: the backward pass of the bf16 kernel takes six times as long,
    40 % of a training step. In fp32, that step is 1.4 times as fast.
    """
    if q.device.type == "cpu" and q.requires_grad and torch.is_autocast_enabled("cpu"):
        with torch.autocast("cpu", enabled=False):
            bias = bias.float() if bias is not None and bias.is_floating_point() else bias
            return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), attn_mask=bias)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def activate(x: Tensor, act: Activation) -> Tensor:
    """The activation of an MLP that is not gated."""
    if act == "quick_gelu":
        return x * torch.sigmoid(1.702 * x)
    return F.gelu(x, approximate="tanh" if act == "gelu_tanh" else "none")


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int, drop: float = 0.0, act: Activation = "gelu"):
        super().__init__()
        self.act: Activation = act
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)
        self.drop = Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.fc2(self.drop(activate(self.fc1(x), self.act))))


class SwiGLU(nn.Module):
    """A gated MLP (https://arxiv.org/abs/2002.05202): SiLU of one half of `fc1`'s output scales the other half."""

    def __init__(self, width: int, hidden: int, drop: float = 0.0):
        super().__init__()
        self.fc1 = nn.Linear(width, 2 * hidden)
        self.fc2 = nn.Linear(hidden, width)
        self.drop = Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        gate, x = self.fc1(x).chunk(2, dim=-1)
        return self.drop(self.fc2(self.drop(F.silu(gate) * x)))


class LayerScale(nn.Module):
    """A learned factor per channel on a residual branch (CaiT), initialised small so that deep models train."""

    def __init__(self, width: int, initial: float):
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), initial))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Dropout(nn.Dropout):
    """Dropout whose masks do not depend on the number of processes: each draws those of the whole batch."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.p:
            return x
        if world().size == 1:
            return F.dropout(x, self.p)
        return x * world().drawn(lambda rows: F.dropout(x.new_ones(rows, *x.shape[1:]), self.p), x.shape[0])


class DropPath(nn.Module):
    """Stochastic depth: drops a residual branch for some samples of a training batch."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if self.rate == 0.0 or not self.training:
            return x
        keep = 1.0 - self.rate
        ones = [1] * (x.ndim - 1)
        draw = world().drawn(lambda rows: torch.rand(rows, *ones, device=x.device, dtype=x.dtype), x.shape[0])
        return x * (draw < keep) / keep


class Block(nn.Module):
    """One pre-norm encoder block: equations 2 and 3."""

    def __init__(
        self,
        width: int,
        heads: int,
        mlp: int,
        drop: float = 0.0,
        drop_path: float = 0.0,
        layer_scale: float = 0.0,
        relative: RelativeBias | None = None,
        act: Activation = "gelu",
        eps: float = 1e-6,
        place: nn.Module | None = None,
        pattern: Pattern | None = None,
    ):
        super().__init__()
        self.place = place  # adds position embeddings before the block
        self.norm1 = nn.LayerNorm(width, eps)
        self.attn = Attention(width, heads, drop, relative, pattern)
        self.ls1 = LayerScale(width, layer_scale) if layer_scale else nn.Identity()
        self.norm2 = nn.LayerNorm(width, eps)
        self.mlp = SwiGLU(width, mlp, drop) if act == "swiglu" else Mlp(width, mlp, drop, act)
        self.ls2 = LayerScale(width, layer_scale) if layer_scale else nn.Identity()
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, keep: Tensor | None = None, first: int | None = None) -> Tensor:
        """`keep` and `first` as in `Attention`."""
        x = x if self.place is None else self.place(x, keep)
        x = x[:, :first] + self.drop_path(self.ls1(self.attn(self.norm1(x), keep, first=first)))
        return x + self.drop_path(self.ls2(self.mlp(self.norm2(x))))


def encode_for_head(blocks: nn.ModuleList, x: Tensor, first: int | None) -> Tensor:
    """Runs the blocks of an encoder; the last computes only the first tokens, if the head reads no others.

    The result is the same, and a model of 12 blocks is 1.07 times as fast, in training and in inference. On the meta
    device, where operations are counted, all tokens are computed, as in published counts.
    """
    *body, last = blocks
    for block in body:
        x = block(x)
    return last(x, first=None if x.is_meta else first)


class AttentionPool(nn.Module):
    """Attention pooling with one learned query, then an MLP: "MAP" of Scaling Vision Transformers."""

    def __init__(self, width: int, heads: int, mlp: int, act: Activation = "gelu", eps: float = 1e-6):
        super().__init__()
        self.heads = heads
        self.latent = nn.Parameter(torch.zeros(1, 1, width))
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * width)
        self.proj = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, eps)
        self.mlp = Mlp(width, mlp, act="gelu" if act == "swiglu" else act)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self._split(x)
        x = attend(q, k, v).transpose(1, 2).flatten(2)
        x = self.proj(x)
        x = x + self.mlp(self.norm(x))
        return x[:, 0]  # B D

    def weights(self, x: Tensor) -> Tensor:
        """The query's attention weights, which `forward` applies but does not materialise: (B, H, 1, N)."""
        q, k, _ = self._split(x)
        return (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(dim=-1)

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = self.q(self.latent).expand(x.shape[0], -1, -1).unflatten(2, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv(x).unflatten(2, (2, self.heads, -1)).unbind(2)  # B N H D/H
        return q, k.transpose(1, 2), v.transpose(1, 2)


class Stage(nn.Module):
    """A stage whose parts are spread over the model: calling it runs the model's method that uses them.

    It is not a submodule of the model and owns no parameters, so each parameter keeps its one name. Parameters of the
    model itself are looked up by name on each access, because loading may replace them.
    """

    def __init__(
        self,
        model: nn.Module,
        run: Callable[..., Any],
        parts: Iterable[nn.Module | None],
        parameters: Iterable[str] = (),
    ):
        super().__init__()
        self.model = (model,)  # a tuple, so that it is not registered as a submodule
        self.run = run
        self.parts = nn.ModuleList(part for part in parts if part is not None)
        self.borrowed = tuple(parameters)

    def forward(self, *inputs: Any) -> Any:
        return self.run(*inputs)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        yield from super().named_parameters(prefix, recurse, remove_duplicate)
        if recurse:  # it owns none directly
            for name in self.borrowed:
                yield f"{prefix}.{name}".lstrip("."), self.model[0].get_parameter(name)


def as_map(tokens: Tensor, grid: Grid) -> Tensor:
    """Tokens of a grid in row-major order as a feature map: (B, D, h, w)."""
    return tokens.transpose(1, 2).reshape(tokens.shape[0], tokens.shape[2], *grid)


def kept(tokens: Tensor, keep: Tensor) -> Tensor:
    """Selects tokens by index, (n,) or (B, n): (B, n, D)."""
    return tokens.take_along_dim(keep.reshape(-1, keep.shape[-1], 1), dim=1)


def head_of(width: int, classes: int) -> nn.Linear | nn.Identity:
    """The linear classifier, or an identity if there are no classes."""
    return nn.Linear(width, classes) if classes else nn.Identity()


def level_depths(depth: int, levels: Levels = True) -> list[int]:
    """The blocks of a plain encoder whose outputs dense heads read, counted from 1, including the last.

    By default four, evenly spaced, as UPerNet and SETR-MLA read ViTs; else after these shares of the depth. All have
    the same stride.
    """
    shares = levels if isinstance(levels, tuple) else QUARTERS
    return sorted({*(int(depth * share) for share in shares), depth} - {0})
