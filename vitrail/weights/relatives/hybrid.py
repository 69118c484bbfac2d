"""Hybrids in the formats of others."""

from __future__ import annotations

from vitrail.errors import UserError
from vitrail.models.hybrid import HybridConfig
from vitrail.weights.relatives import Format, Layout, same

LAYOUTS: dict[Format, Layout] = {"timm": Layout(r"patch_embed\.backbone\.(?:stem\.)?conv\.weight", same, same)}


def architecture(where: str, *_: object) -> HybridConfig:
    """The architecture that tensors have, by their shapes."""
    raise UserError(f"{where} needs its model.json beside it.")
