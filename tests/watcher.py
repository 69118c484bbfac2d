"""A model made by hand of which it is known where it looks."""

from __future__ import annotations

import torch

from vitrail.models import build
from vitrail.models.vit import ViT, ViTConfig

GRID, PATCH = 4, 4


def watcher(*patches: int) -> ViT:
    """Class k is as likely as patch number `patches[k]` is bright: head k attends to that patch and to no other.

    The channels of a token: brightness, its negative, a mark for each watched patch, and what each head has seen.
    """
    classes = len(patches)
    width, seen = 4 * classes, 2 + classes
    assert seen + classes <= width
    model = build(
        ViTConfig(width, 1, classes, 4, PATCH, (GRID * PATCH, GRID * PATCH), channels=1, classes=classes)
    ).eval()
    block = model.blocks[0]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for norm in (block.norm1, block.norm2, model.norm):
            norm.weight.fill_(1)
        model.patch_embed.proj.weight[:2] = torch.tensor([1.0, -1.0]).view(2, 1, 1, 1) / PATCH**2
        model.cls_token[..., 1] = 1
        queries, keys, values = block.attn.qkv.weight.view(3, classes, 4, width).unbind()
        for k, patch in enumerate(patches):
            model.pos_embed[0, 1 + patch, 2 + k] = 4
            block.attn.qkv.bias.view(3, classes, 4)[0, k, 0] = 20
            keys[k, 0, 2 + k] = 2
            values[k, 0, 0] = 1
            block.attn.proj.weight.view(width, classes, 4)[seen + k, k, 0] = 1
            model.head.weight[k, seen + k] = 8
        assert not queries.any()
    return model
