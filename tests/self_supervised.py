"""MAE and DINO as in their authors' checkpoints, with random weights: names, shapes and forward passes.

- https://github.com/facebookresearch/mae, `models_mae.py`: a ViT of timm's layers with a decoder;
- https://github.com/facebookresearch/dino, `main_dino.py`: a student and a teacher, each a ViT with a head.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from peers import randomise, timm, timm_vit
from torch import Tensor, nn

from vitrail.models.vit import ViTConfig


def fixed_positions(width: int, side: int) -> Tensor:
    """MAE's `get_2d_sincos_pos_embed` with a class token, (1, 1 + N, D)."""
    omega = 1.0 / 10000 ** (np.arange(width // 4) / (width / 4.0))
    rows = np.zeros((1 + side * side, width))
    for y in range(side):
        for x in range(side):
            angles = x * omega, y * omega
            rows[1 + y * side + x] = np.concatenate([f(a) for a in angles for f in (np.sin, np.cos)])
    return torch.from_numpy(rows).float().unsqueeze(0)


class AuthorsMae(nn.Module):
    """`MaskedAutoencoderViT` with `norm_pix_loss`."""

    def __init__(self, config: ViTConfig, width: int, depth: int, heads: int):
        super().__init__()
        layers, norm = timm("timm.models.vision_transformer"), partial(nn.LayerNorm, eps=1e-6)
        ratio, patches = config.mlp / config.width, config.grid[0] * config.grid[1]
        self.patch = config.patch
        self.patch_embed = layers.PatchEmbed(config.img_size[0], config.patch, config.channels, config.width)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.width))
        self.pos_embed = nn.Parameter(torch.zeros(1, patches + 1, config.width), requires_grad=False)
        blocks = [layers.Block(config.width, config.heads, ratio, True, norm_layer=norm) for _ in range(config.depth)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm(config.width)
        self.decoder_embed = nn.Linear(config.width, width)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, width))
        self.decoder_pos_embed = nn.Parameter(torch.zeros(1, patches + 1, width), requires_grad=False)
        self.decoder_blocks = nn.ModuleList(
            [layers.Block(width, heads, 4, True, norm_layer=norm) for _ in range(depth)]
        )
        self.decoder_norm = norm(width)
        self.decoder_pred = nn.Linear(width, config.patch**2 * config.channels)

    def forward(self, images: Tensor, noise: Tensor, ratio: float) -> tuple[Tensor, Tensor, Tensor]:
        """The loss, the predictions and the mask."""
        x = self.patch_embed(images) + self.pos_embed[:, 1:]
        b, n, d = x.shape
        keep = int(n * (1 - ratio))
        shuffle = noise.argsort(dim=1)
        restore = shuffle.argsort(dim=1)
        x = x.gather(1, shuffle[:, :keep].unsqueeze(-1).repeat(1, 1, d))
        mask = torch.ones(b, n)
        mask[:, :keep] = 0
        mask = mask.gather(1, restore)
        x = torch.cat([(self.cls_token + self.pos_embed[:, :1]).expand(b, -1, -1), x], dim=1)
        for block in self.blocks:
            x = block(x)
        x = self.decoder_embed(self.norm(x))
        whole = torch.cat([x[:, 1:], self.mask_token.repeat(b, n - keep, 1)], dim=1)
        whole = whole.gather(1, restore.unsqueeze(-1).repeat(1, 1, x.shape[2]))
        x = torch.cat([x[:, :1], whole], dim=1) + self.decoder_pos_embed
        for block in self.decoder_blocks:
            x = block(x)
        predicted = self.decoder_pred(self.decoder_norm(x))[:, 1:]
        side, p = int(n**0.5), self.patch
        target = torch.einsum("nchpwq->nhwpqc", images.reshape(b, images.shape[1], side, p, side, p)).reshape(b, n, -1)
        mean, var = target.mean(dim=-1, keepdim=True), target.var(dim=-1, keepdim=True)
        errors = ((predicted - (target - mean) / (var + 1e-6) ** 0.5) ** 2).mean(dim=-1)
        return (errors * mask).sum() / mask.sum(), predicted, mask


def authors_mae(config: ViTConfig, width: int = 64, depth: int = 2) -> AuthorsMae:
    """MAE with random weights and its fixed positions."""
    model = randomise(AuthorsMae(config, width, depth, width // 32))
    model.pos_embed.data = fixed_positions(config.width, config.grid[0])
    model.decoder_pos_embed.data = fixed_positions(width, config.grid[0])
    return model


class _LastLayer(nn.Module):
    """A layer under `torch.nn.utils.weight_norm`."""

    def __init__(self, width: int, out: int):
        super().__init__()
        self.weight_g = nn.Parameter(torch.ones(out, 1))
        self.weight_v = nn.Parameter(torch.randn(out, width) / 16)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight_g * self.weight_v / self.weight_v.norm(dim=1, keepdim=True))


class AuthorsDinoHead(nn.Module):
    """`DINOHead` with its defaults, but fewer hidden units."""

    def __init__(self, width: int, prototypes: int, hidden: int):
        super().__init__()
        layers = [nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, 256)]
        self.mlp = nn.Sequential(*layers)
        self.last_layer = _LastLayer(256, prototypes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last_layer(F.normalize(self.mlp(x), dim=-1, p=2))
        return logits


class AuthorsDino(nn.Module):
    """`MultiCropWrapper`: a ViT without its head, and DINO's."""

    def __init__(self, config: ViTConfig, prototypes: int = 48, hidden: int = 40):
        super().__init__()
        self.backbone = timm_vit(config, num_classes=0)
        self.head = AuthorsDinoHead(config.width, prototypes, hidden)


def authors_dino(config: ViTConfig) -> tuple[AuthorsDino, AuthorsDino, dict[str, Any]]:
    """Student, teacher and the checkpoint of a run."""
    student, teacher = (randomise(AuthorsDino(config), seed) for seed in (1, 2))
    checkpoint = {
        "student": {f"module.{name}": value for name, value in student.state_dict().items()},
        "teacher": teacher.state_dict(),
        "optimizer": {"state": {}, "param_groups": []},
        "epoch": 3,
        "args": argparse.Namespace(arch="vit_small", out_dim=48),
        "dino_loss": {"center": torch.zeros(1, 48)},
    }
    return student, teacher, checkpoint
