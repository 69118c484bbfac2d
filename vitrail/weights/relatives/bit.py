"""BiT in the formats of others."""

from __future__ import annotations

from vitrail.errors import UserError
from vitrail.models.bit import BiTConfig
from vitrail.weights.relatives import Format, Layout, from_stages, to_stages

LAYOUTS: dict[Format, Layout] = {
    "timm": Layout(r"(?:stages|layers)\.0\.blocks\.0\.norm3\.weight", from_stages, to_stages)
}


def architecture(where: str, *_: object) -> BiTConfig:
    """The architecture that tensors have, by their shapes."""
    raise UserError(f"{where} needs its model.json beside it.")
