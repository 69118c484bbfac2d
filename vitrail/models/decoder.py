"""Decoders of masked image modelling: from the encoder's tokens back to the pixels of the patches.

They exist only during pre-training. Parameter names follow the authors' code: MAE's
(https://github.com/facebookresearch/mae) without the prefix `decoder_`, SimMIM's as in transformers.

Legend: B batch, N patches, D width, P pixels per side of a patch, C channels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitrail.models.layers import Block
from vitrail.models.position import Grid, sincos2d


class MaeDecoder(nn.Module):
    """MAE's decoder: a light transformer over visible tokens and mask tokens (https://arxiv.org/abs/2111.06377).

    `prefix` tokens of the encoder, such as the class token, are passed through it but not reconstructed.
    """

    pos: Tensor

    def __init__(
        self, width: int, grid: Grid, prefix: int, out: int, *, inner: int, depth: int, heads: int, eps: float = 1e-6
    ):
        super().__init__()
        self.prefix, self.heads = prefix, heads
        self.embed = nn.Linear(width, inner)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, inner))
        places = torch.cat([torch.zeros(prefix, inner), sincos2d(grid, inner, endpoint=False)])
        self.register_buffer("pos", places.unsqueeze(0), persistent=False)
        self.blocks = nn.ModuleList(Block(inner, heads, 4 * inner, eps=eps) for _ in range(depth))
        self.norm = nn.LayerNorm(inner, eps)
        self.pred = nn.Linear(inner, out)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.mask_token, std=0.02)

    def forward(self, tokens: Tensor, restore: Tensor) -> Tensor:
        """The predictions for all patches, (B, N, P·P·C).

        `tokens` are the encoder's outputs for its prefix and the visible patches; `restore`, (B, N), is the place of
        each patch in the sequence of visible, then masked patches.
        """
        x = self.embed(tokens)
        prefix, visible = x[:, : self.prefix], x[:, self.prefix :]
        masked = self.mask_token.to(x.dtype).expand(len(x), restore.shape[1] - visible.shape[1], -1)
        patches = torch.cat([visible, masked], dim=1).take_along_dim(restore.unsqueeze(2), dim=1)
        x = torch.cat([prefix, patches], dim=1) + self.pos
        for block in self.blocks:
            x = block(x)
        predictions: Tensor = self.pred(self.norm(x))[:, self.prefix :]
        return predictions


class PixelDecoder(nn.Sequential):
    """SimMIM's decoder: a 1×1 convolution to the pixels of each position, rearranged to an image (B, C, H, W)."""

    def __init__(self, width: int, stride: int, channels: int):
        super().__init__(nn.Conv2d(width, stride * stride * channels, 1), nn.PixelShuffle(stride))


class MaskToken(nn.Module):
    """A learned value in place of masked tokens, (1, 1, D), or masked pixels, (1, C, 1, 1)."""

    def __init__(self, *shape: int):
        super().__init__()
        self.token = nn.Parameter(torch.zeros(shape))
        nn.init.trunc_normal_(self.token, std=0.02)

    def forward(self, values: Tensor, mask: Tensor, added: Tensor | None = None) -> Tensor:
        """`values` with the masked ones replaced by the token, plus what is `added` to it, such as positions."""
        token = self.token if added is None else self.token + added
        return torch.where(mask, token.to(values.dtype), values)


def patchify(images: Tensor, patch: int) -> Tensor:
    """Images (B, C, H, W) as patches (B, N, P·P·C), in row-major order."""
    b, c, h, w = images.shape
    cut = images.reshape(b, c, h // patch, patch, w // patch, patch)
    return cut.permute(0, 2, 4, 3, 5, 1).reshape(b, -1, patch * patch * c)


def unpatchify(patches: Tensor, grid: Grid, patch: int) -> Tensor:
    """The inverse of `patchify`."""
    b, channels = len(patches), patches.shape[2] // patch**2
    cut = patches.reshape(b, *grid, patch, patch, channels)
    return cut.permute(0, 5, 1, 3, 2, 4).reshape(b, channels, grid[0] * patch, grid[1] * patch)
