"""PVT v2 in the formats of others."""

from __future__ import annotations

from vitrail.errors import UserError
from vitrail.models.pvt_v2 import PVTv2Config
from vitrail.weights.relatives import Format, Layout, from_stages, to_stages

LAYOUTS: dict[Format, Layout] = {
    "timm": Layout(r"(?:stages|layers)\.0\.blocks\.0\.mlp\.dwconv\.weight", from_stages, to_stages)
}


def architecture(where: str, *_: object) -> PVTv2Config:
    """The architecture that tensors have, by their shapes."""
    raise UserError(f"{where} needs its model.json beside it.")
