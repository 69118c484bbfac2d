"""YOLOS: "You Only Look at One Sequence", https://arxiv.org/abs/2106.00666. Detection tokens in a ViT.

Learned tokens are appended to the ViT's sequence, and two MLPs read a class and a box from the output of each. There is
no decoder and no feature map; a set loss matches tokens and objects. The published models, but for the smallest, also
add position embeddings after each block but the last: `yolos-mid`.

Legend: B batch, N tokens of the ViT, D width, Q detection tokens, K classes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from vitrail.models.heads.boxes import BoxHead
from vitrail.models.model import Model, ModelConfig
from vitrail.models.position import Grid, Interpolation, resample
from vitrail.models.vit import ViTConfig

TOKENS = 100


class BoxMlp(nn.Module):
    """Three linear layers with ReLU between them."""

    def __init__(self, width: int, outputs: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, out) for out in (width, width, outputs))

    def forward(self, x: Tensor) -> Tensor:
        first, second, last = self.layers
        outputs: Tensor = last(second(first(x).relu()).relu())
        return outputs


def as_pixels(logits: Tensor, boxes: Tensor, size: Grid) -> Tensor:
    """Logits (B, Q, K + 1) and centres and sizes before the sigmoid, (B, Q, 4), as outputs: (B, Q, 4 + K + 1)."""
    shares = boxes.float().sigmoid()  # pixels need more digits than bf16 has
    centre, half = shares[..., :2], shares[..., 2:] / 2
    corners = torch.cat([centre - half, centre + half], dim=-1) * shares.new_tensor([size[1], size[0]] * 2)
    return torch.cat([corners, logits.float()], dim=-1)


class Yolos(BoxHead):
    title = "detection tokens in a ViT"
    adds_tokens = True
    local = False
    middle = False  # whether positions are added after each block but the last

    def __init__(self, body: ModelConfig, classes: int):
        super().__init__(body, classes)
        assert isinstance(body, ViTConfig)
        self.size = body.img_size
        self.det_token = nn.Parameter(torch.zeros(1, TOKENS, body.width))
        self.det_pos = nn.Parameter(torch.zeros(1, TOKENS, body.width))
        middle = torch.zeros(body.depth - 1, 1, body.length + TOKENS, body.width)
        self.mid_pos = nn.Parameter(middle) if self.middle else None
        self.class_embed = BoxMlp(body.width, classes + 1)
        self.bbox_embed = BoxMlp(body.width, 4)
        for parameter in (self.det_token, self.det_pos, self.mid_pos):
            if parameter is not None and not parameter.is_meta:
                nn.init.trunc_normal_(parameter, std=0.02)

    @classmethod
    def misfit(cls, body: ModelConfig) -> str:
        if isinstance(body, ViTConfig) and (body.pos, body.pool, body.registers) == ("learned", "cls", 0):
            return ""
        return "needs a ViT with a class token, learned positions and no registers, such as vit_ti16. Use --head fcos."

    def read(self, backbone: Model, images: Tensor) -> Tensor:
        """The detection tokens after the encoder: (B, Q, D)."""
        tokens = backbone.tokens(images)
        x = torch.cat([tokens, (self.det_token + self.det_pos).expand(len(tokens), -1, -1)], dim=1)
        if self.mid_pos is None:
            return backbone.encode(x)[:, -TOKENS:]
        *blocks, last = backbone.encoder()
        for block, positions in zip(blocks, self.mid_pos, strict=True):
            x = block(x) + positions
        normed: Tensor = backbone.stages()[-1](last(x), False)
        return normed[:, -TOKENS:]

    def forward(self, read: Tensor) -> Tensor:
        return as_pixels(self.class_embed(read), self.bbox_embed(read), self.size)  # B Q 4+K+1

    @classmethod
    def resized_state(
        cls, state: Mapping[str, Tensor], old: ModelConfig, new: ModelConfig, method: Interpolation
    ) -> dict[str, Tensor]:
        """The positions of patches after each block, resampled to another grid."""
        resized = dict(state)
        if "mid_pos" in state:
            rows = state["mid_pos"][:, 0]
            patches = [resample(each[1:-TOKENS], old.grid, new.grid, method) for each in rows]
            resized["mid_pos"] = torch.cat([rows[:, :1], torch.stack(patches), rows[:, -TOKENS:]], dim=1)[:, None]
        return resized


class YolosMid(Yolos):
    title = "detection tokens in a ViT, with positions after each block"
    middle = True
