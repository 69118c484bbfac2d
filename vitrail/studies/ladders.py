"""Ladders of models over one and a half to two orders of magnitude of compute, for images of 8 to 64 pixels."""

from __future__ import annotations

from typing import Any

from vitrail.studies.lab import Lab

Ladder = dict[str, dict[str, Any]]  # by size, the settings of a model


def vits(lab: Lab) -> Ladder:
    """The paper's ViT: patches, class token, learned positions."""
    sizes = {"XS": (16, 2, 1), "S": (32, 3, 2), "M": (64, 4, 2), "L": (96, 5, 3), "XL": (128, 6, 4)}
    return {
        size: {"model": f"vit_w{width}d{depth}h{heads}m{2 * width}p{lab.patch}"}
        for size, (width, depth, heads) in sizes.items()
    }


def bits(lab: Lab) -> Ladder:
    """BiT: a ResNet with GroupNorm and standardised weights."""
    stages = 3 if min(lab.size) >= 16 else 2
    sizes = {"XS": (8, 1), "S": (16, 1), "M": (32, 1), "L": (48, 1), "XL": (64, 2)}
    return {
        size: {"model": f"bit_w{width}d{'-'.join([str(depth)] * stages)}"} for size, (width, depth) in sizes.items()
    }


def hybrids(_lab: Lab) -> Ladder:
    """The hybrid: a ViT on the feature map of a small ResNet, whose stride is 4."""
    sizes = {
        "XS": (16, 2, 1, 16, 1),
        "S": (32, 3, 2, 16, 1),
        "M": (64, 4, 2, 32, 1),
        "L": (96, 5, 3, 48, 1),
        "XL": (128, 6, 4, 64, 2),
    }
    return {
        size: {"model": f"hybrid_w{width}d{depth}h{heads}m{2 * width}r{out}b{blocks}"}
        for size, (width, depth, heads, out, blocks) in sizes.items()
    }


FAMILIES = {"ViT": vits, "BiT": bits, "hybrid": hybrids}
