"""PVT in the formats of others."""

from __future__ import annotations

from vitrail.errors import UserError
from vitrail.models.pvt import PVTConfig
from vitrail.weights.relatives import Format, Layout, same

LAYOUTS: dict[Format, Layout] = {"original": Layout(r"patch_embed1\.proj\.weight", same)}


def architecture(where: str, *_: object) -> PVTConfig:
    """The architecture that tensors have, by their shapes."""
    raise UserError(f"{where} needs its model.json beside it.")
