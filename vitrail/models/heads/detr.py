"""DETR's transformer, https://arxiv.org/abs/2005.12872, on the last feature map of a backbone.

A 1×1 convolution narrows the map; a post-norm encoder with sine positions reads it; learned queries ask the decoder for
one object each. A set loss matches queries and objects, also for the outputs of all but the last decoder layer
(`auxiliary`). Tensor names are those in files of transformers' `DetrForObjectDetection`.

Legend: B batch, N positions of the map, C channels of the transformer, Q queries, K classes.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.models.heads.boxes import BoxHead
from vitrail.models.heads.yolos import BoxMlp, as_pixels
from vitrail.models.layers import attend
from vitrail.models.model import ModelConfig
from vitrail.models.position import Grid

QUERIES = 100
CHANNELS, HEADS, MLP, LAYERS = 256, 8, 2048, 6  # of the published models; narrower backbones get narrower ones


def sizes(width: int) -> tuple[int, int, int]:
    """The channels, the hidden width of MLPs and the layers of encoder and decoder, on a backbone of this width."""
    if width >= CHANNELS:
        return CHANNELS, MLP, LAYERS
    channels = max(width // (2 * HEADS) * 2 * HEADS, 2 * HEADS)
    return channels, 4 * channels, LAYERS // 2


class DetrAttention(nn.Module):
    """Multi-head attention whose queries and keys get positions and whose values do not."""

    def __init__(self, channels: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(channels, channels) for _ in range(4))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        split = ((self.q_proj, q), (self.k_proj, k), (self.v_proj, v))
        q, k, v = (layer(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for layer, x in split)
        answer: Tensor = self.out_proj(attend(q, k, v).transpose(1, 2).flatten(2))
        return answer


class DetrLayer(nn.Module):
    """A post-norm layer: self-attention, in the decoder attention to the encoder's output, an MLP with ReLU."""

    def __init__(self, channels: int, heads: int, mlp: int, cross: bool):
        super().__init__()
        self.self_attn = DetrAttention(channels, heads)
        self.self_attn_layer_norm = nn.LayerNorm(channels)
        self.encoder_attn = DetrAttention(channels, heads) if cross else None
        self.encoder_attn_layer_norm = nn.LayerNorm(channels) if cross else None
        self.fc1, self.fc2 = nn.Linear(channels, mlp), nn.Linear(mlp, channels)
        self.final_layer_norm = nn.LayerNorm(channels)

    def forward(self, x: Tensor, places: Tensor, memory: Tensor | None = None, where: Tensor | None = None) -> Tensor:
        x = self.self_attn_layer_norm(x + self.self_attn(x + places, x + places, x))
        if self.encoder_attn is not None and self.encoder_attn_layer_norm is not None:
            assert memory is not None
            assert where is not None
            x = self.encoder_attn_layer_norm(x + self.encoder_attn(x + places, memory + where, memory))
        return self.final_layer_norm(x + self.fc2(F.relu(self.fc1(x))))


class DetrEncoder(nn.Module):
    def __init__(self, channels: int, heads: int, mlp: int, layers: int):
        super().__init__()
        self.layers = nn.ModuleList(DetrLayer(channels, heads, mlp, cross=False) for _ in range(layers))

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, places)
        return x


class DetrDecoder(nn.Module):
    def __init__(self, channels: int, heads: int, mlp: int, layers: int):
        super().__init__()
        self.layers = nn.ModuleList(DetrLayer(channels, heads, mlp, cross=True) for _ in range(layers))
        self.layernorm = nn.LayerNorm(channels)

    def forward(self, queries: Tensor, memory: Tensor, where: Tensor) -> list[Tensor]:
        """The normalised output of every layer."""
        x, found = torch.zeros_like(queries), []
        for layer in self.layers:
            x = layer(x, queries, memory, where)
            found.append(self.layernorm(x))
        return found


class Detr(BoxHead):
    title = "DETR's encoder and decoder on the last feature map"

    def __init__(self, body: ModelConfig, classes: int):
        super().__init__(body, classes)
        channels, mlp, layers = sizes(body.width)
        self.size = body.img_size
        self.input_projection = nn.Conv2d(body.width, channels, 1)
        self.query_position_embeddings = nn.Embedding(QUERIES, channels)
        self.encoder = DetrEncoder(channels, HEADS, mlp, layers)
        self.decoder = DetrDecoder(channels, HEADS, mlp, layers)
        self.class_labels_classifier = nn.Linear(channels, classes + 1)
        self.bbox_predictor = BoxMlp(channels, 4)
        if not self.input_projection.weight.is_meta:
            for name, parameter in (*self.encoder.named_parameters(), *self.decoder.named_parameters()):
                if parameter.ndim > 1 and "norm" not in name:
                    nn.init.xavier_uniform_(parameter)

    def forward(self, read: Tensor) -> Tensor:
        return self._predict(self._decode(read)[-1])

    def auxiliary(self, read: Tensor) -> tuple[Tensor, ...]:
        return tuple(self._predict(x) for x in self._decode(read)[:-1])

    def _decode(self, read: Tensor) -> list[Tensor]:
        x = self.input_projection(read)
        where = sine_positions((x.shape[2], x.shape[3]), x.shape[1]).to(x)
        memory = self.encoder(x.flatten(2).transpose(1, 2), where)
        queries = self.query_position_embeddings.weight.repeat(len(x), 1, 1)
        found: list[Tensor] = self.decoder(queries, memory, where)
        return found

    def _predict(self, x: Tensor) -> Tensor:
        return as_pixels(self.class_labels_classifier(x), self.bbox_predictor(x), self.size)


def sine_positions(grid: Grid, channels: int) -> Tensor:
    """DETR's positions, (1, h·w, C): sines and cosines of y, then of x, in turn, both scaled to 2π."""
    half = channels // 2
    rate = 10_000 ** (2 * (torch.arange(half) // 2) / half)
    axes = []
    for count in grid:
        at = (torch.arange(count) + 1) / (count + 1e-6) * 2 * math.pi
        angle = at[:, None] / rate
        axes.append(torch.stack([angle[:, 0::2].sin(), angle[:, 1::2].cos()], dim=2).flatten(1))  # count C/2
    rows, columns = axes
    both = [rows[:, None].expand(-1, grid[1], -1), columns[None].expand(grid[0], -1, -1)]
    return torch.cat(both, dim=-1).flatten(0, 1)[None]
