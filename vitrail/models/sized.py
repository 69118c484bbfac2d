"""Models of any size, built from their names, for images of 8 to 96 pixels: ladders of models need sizes between.

- `vit_w64d4h2m128p4`: the paper's ViT of width 64 and depth 4, 2 heads, MLPs of 128 units, patches of 4 pixels.
- `bit_w32d1-1-1`: BiT with stages of width 32, 64 and 128, of a block each, and a stem that does not downsample.
- `hybrid_w64d4h2m128r32b1`: such a ViT on a ResNet stage of width 32 with one block, whose stride is 4.
"""

from __future__ import annotations

import re
from typing import Any

from vitrail.models.bit import BiTConfig
from vitrail.models.hybrid import HybridConfig
from vitrail.models.vit import ViTConfig

_SIDE = 32


def of_name(name: str) -> Any:
    """The configuration of a model named by its sizes, or None."""
    if match := re.fullmatch(r"vit_w(\d+)d(\d+)h(\d+)m(\d+)p(\d+)", name):
        width, depth, heads, mlp, patch = map(int, match.groups())
        side = max(round(_SIDE / max(patch, 1)), 1) * patch
        return ViTConfig(width, depth, heads, mlp, patch, (side, side))
    if match := re.fullmatch(r"bit_w(\d+)d(\d+(?:-\d+)*)", name):
        width, depths = int(match[1]), tuple(map(int, match[2].split("-")))
        widths = tuple(width * 2**i for i in range(len(depths)))
        return BiTConfig(widths, depths, shrink=False, groups=_groups(width), img_size=(_SIDE, _SIDE))
    if match := re.fullmatch(r"hybrid_w(\d+)d(\d+)h(\d+)m(\d+)r(\d+)b(\d+)", name):
        width, depth, heads, mlp, out, blocks = map(int, match.groups())
        first = max(out // 2, 4)
        groups = min(_groups(out), _groups(4 * first))
        return HybridConfig(width, depth, heads, mlp, (out,), (blocks,), first, groups, img_size=(_SIDE, _SIDE))
    return None


def _groups(width: int) -> int:
    """Groups of GroupNorm, at most 8, that divide a quarter of the width."""
    return max(groups for groups in (1, 2, 4, 8) if width % (4 * groups) == 0 or groups == 1)
