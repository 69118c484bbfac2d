"""The parts that models share: attention, the MLP, the pre-norm block, and what regularises them.

Legend: B batch, N tokens, D width, H heads. Parameter names are timm's.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.models.position import RelativeBias

Activation = Literal["gelu", "swiglu"]


class Attention(nn.Module):
    """Multi-head self-attention (appendix A), through whichever fused kernel the device has."""

    def __init__(self, width: int, heads: int, drop: float = 0.0, relative: RelativeBias | None = None):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.drop = nn.Dropout(drop)
        self.relative = relative

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self._split(x)
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=self._bias(q))
        x = x.transpose(1, 2).flatten(2)  # B N D
        return self.drop(self.proj(x))

    def weights(self, x: Tensor) -> Tensor:
        """The attention map that `forward` applies to the same input but never stores: (B, H, N, N)."""
        q, k, _ = self._split(x)
        logits = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        bias = self._bias(q)
        return (logits if bias is None else logits + bias).softmax(dim=-1)

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        qkv = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # 3 B H N D/H
        return qkv[0], qkv[1], qkv[2]

    def _bias(self, like: Tensor) -> Tensor | None:
        return None if self.relative is None else self.relative().to(like.dtype)


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int, drop: float = 0.0):
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.fc2(self.drop(F.gelu(self.fc1(x)))))


class SwiGLU(nn.Module):
    """A gated MLP (https://arxiv.org/abs/2002.05202): one half of what `fc1` gives, through SiLU, scales the other."""

    def __init__(self, width: int, hidden: int, drop: float = 0.0):
        super().__init__()
        self.fc1 = nn.Linear(width, 2 * hidden)
        self.fc2 = nn.Linear(hidden, width)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        gate, x = self.fc1(x).chunk(2, dim=-1)
        return self.drop(self.fc2(self.drop(F.silu(gate) * x)))


class LayerScale(nn.Module):
    """A learned factor per channel on a residual branch (CaiT), started small so that depth trains."""

    def __init__(self, width: int, initial: float):
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), initial))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class DropPath(nn.Module):
    """Stochastic depth: leaves out a residual branch for some samples of a training batch."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if self.rate == 0.0 or not self.training:
            return x
        keep = 1.0 - self.rate
        mask = torch.rand(x.shape[0], *[1] * (x.ndim - 1), device=x.device, dtype=x.dtype) < keep
        return x * mask / keep


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
    ):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = Attention(width, heads, drop, relative)
        self.ls1 = LayerScale(width, layer_scale) if layer_scale else nn.Identity()
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = (Mlp if act == "gelu" else SwiGLU)(width, mlp, drop)
        self.ls2 = LayerScale(width, layer_scale) if layer_scale else nn.Identity()
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.ls1(self.attn(self.norm1(x))))
        return x + self.drop_path(self.ls2(self.mlp(self.norm2(x))))


class AttentionPool(nn.Module):
    """One learned query that attends to all tokens, then an MLP: "MAP" of Scaling Vision Transformers."""

    def __init__(self, width: int, heads: int, mlp: int):
        super().__init__()
        self.heads = heads
        self.latent = nn.Parameter(torch.zeros(1, 1, width))
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * width)
        self.proj = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.mlp = Mlp(width, mlp)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self._split(x)
        x = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.proj(x)
        x = x + self.mlp(self.norm(x))
        return x[:, 0]  # B D

    def weights(self, x: Tensor) -> Tensor:
        """The attention of the query to the tokens that `forward` applies but never stores: (B, H, 1, N)."""
        q, k, _ = self._split(x)
        return (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(dim=-1)

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = self.q(self.latent).expand(x.shape[0], -1, -1).unflatten(2, (self.heads, -1)).transpose(1, 2)
        kv = self.kv(x).unflatten(2, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)  # 2 B H N D/H
        return q, kv[0], kv[1]


class Stage(nn.Module):
    """Parts of a model that belong together in depth but are not called together: one entry of `stages()`."""

    def __init__(self, *parts: nn.Module | nn.Parameter | None):
        super().__init__()
        self.parts = nn.ModuleList(p for p in parts if isinstance(p, nn.Module))
        self.loose = nn.ParameterList(p for p in parts if isinstance(p, nn.Parameter))
