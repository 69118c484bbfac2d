"""Segmenter's mask transformer: class tokens attend to the patches, and a patch belongs to the class most like it.

https://arxiv.org/abs/2105.05633: two encoder blocks on the patches and K class tokens; the mask of a class is the
product of its token with the patches, both projected and L2-normalised, then a LayerNorm over the classes. Tensor names
are mmsegmentation's.

Legend: B batch, N patches, D width, K classes, (h, w) feature map.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitrail.models.heads.head import Head
from vitrail.models.layers import Block, as_map
from vitrail.models.model import ModelConfig

DEPTH = 2
_HEAD_WIDTH = 64  # channels of an attention head


class MaskTransformer(Head):
    title = "Segmenter's mask transformer"

    def __init__(self, body: ModelConfig, classes: int):
        super().__init__(body, classes)
        width = body.width
        heads = max(width // _HEAD_WIDTH, 1)
        self.dec_proj = nn.Linear(width, width)
        self.cls_emb = nn.Parameter(torch.zeros(1, classes, width))
        self.layers = nn.ModuleList(Block(width, heads, 4 * width, eps=1e-5) for _ in range(DEPTH))
        self.decoder_norm = nn.LayerNorm(width)
        self.patch_proj = nn.Linear(width, width, bias=False)
        self.classes_proj = nn.Linear(width, width, bias=False)
        self.mask_norm = nn.LayerNorm(classes)
        if not self.cls_emb.is_meta:
            self._initialise()

    @classmethod
    def misfit(cls, body: ModelConfig) -> str:
        if len(body.grids) > 1 or body.width % max(body.width // _HEAD_WIDTH, 1):
            return (
                f"needs one map of tokens, as of a ViT, not the {len(body.grids)} stages of a pyramid. Use --head mlp."
            )
        return ""

    @classmethod
    def too_few(cls, classes: int) -> str:
        if classes > 2:
            return ""
        return (
            f"needs at least three classes, not {classes}: its LayerNorm over the logits of two leaves their sign, "
            "from which hardly anything is learnt. Use --head linear."
        )

    def forward(self, read: Tensor) -> Tensor:
        grid = read.shape[2], read.shape[3]
        x = self.dec_proj(read.flatten(2).transpose(1, 2))  # B N D
        x = torch.cat([x, self.cls_emb.expand(len(x), -1, -1)], dim=1)
        for block in self.layers:
            x = block(x)
        x = self.decoder_norm(x)
        classes = self.cls_emb.shape[1]
        patches = nn.functional.normalize(self.patch_proj(x[:, :-classes]), dim=2)
        tokens = nn.functional.normalize(self.classes_proj(x[:, -classes:]), dim=2)
        return as_map(self.mask_norm(patches @ tokens.mT), grid)  # B K h w

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                nn.init.trunc_normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        for layer in (self.patch_proj, self.classes_proj):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
