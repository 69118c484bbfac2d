"""Dense heads: from a backbone's feature maps to an output for every place of the image, such as masks and boxes.

A head is a class in a file of this package, registered in `HEADS` under its name. `models/dense.py` joins it with a
backbone.
"""

from __future__ import annotations

from vitrail.models.heads.boxes import Fcos, Pyramid
from vitrail.models.heads.detr import Detr
from vitrail.models.heads.head import Head
from vitrail.models.heads.linear import Linear
from vitrail.models.heads.mask import MaskTransformer
from vitrail.models.heads.mlp import Mlp
from vitrail.models.heads.setr import SetrMla, SetrNaive, SetrPup
from vitrail.models.heads.yolos import Yolos, YolosMid

__all__ = ["HEADS", "Head"]

HEADS: dict[str, type[Head]] = {
    "linear": Linear,
    "fcos": Fcos,
    "pyramid": Pyramid,
    "yolos": Yolos,
    "yolos-mid": YolosMid,
    "detr": Detr,
    "mask": MaskTransformer,
    "setr-naive": SetrNaive,
    "setr-pup": SetrPup,
    "setr-mla": SetrMla,
    "mlp": Mlp,
}
