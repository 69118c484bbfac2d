"""The answer of a segmentation: a class for every pixel of an image, its areas, and pictures of it."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from vitrail.tasks.answer import Answer

if TYPE_CHECKING:
    from PIL import Image

Labels = NDArray[np.integer[Any]]

OPACITY = 0.55  # of a mask over its image
# A first class with one of these names is not drawn over an image.
GROUNDS = frozenset({"background", "ground", "other", "unlabelled", "unlabeled", "void", "none", "_background_"})
_HUES = 0.61803398875  # golden ratio: neighbouring classes get distant hues


@dataclass(frozen=True, eq=False)
class MaskAnswer(Answer):
    """The classes of an image, largest area first, with their shares of the area as `probabilities`, and the mask."""

    mask: Labels = field(default_factory=lambda: np.zeros((0, 0), np.uint8))  # (H, W) class indices
    classes: tuple[str, ...] = ()

    form: ClassVar[str] = "areas"

    def text(self, digits: int = 1, width: int = 0) -> str:
        return super().text(digits, width).replace("(no label)", "(nothing)")

    def columns(self) -> list[str]:
        return ["height", "width", *(f"pixels of {name}" for name in self.classes)]

    def cells(self) -> list[str]:
        return [*map(str, self.mask.shape), *map(str, self._areas().tolist())]

    def to_json(self) -> dict[str, Any]:
        return {
            "labels": self.labels,
            "probabilities": self.probabilities,
            "size": list(self.mask.shape),
            "pixels": dict(zip(self.classes, self._areas().tolist(), strict=True)),
        }

    def scores(self) -> list[float]:
        """The share of each class of the area."""
        return [float(area) for area in self._areas() / max(self.mask.size, 1)]

    def _areas(self) -> NDArray[np.int64]:
        return np.bincount(self.mask.ravel(), minlength=len(self.classes))

    def above(self, threshold: float) -> Answer:
        return self

    def layer(self) -> Image.Image:
        return mask_layer(self.mask, self.classes)

    def files(self) -> dict[str, bytes]:
        stream = io.BytesIO()
        palette_image(self.mask, len(self.classes)).save(stream, "PNG", optimize=True)
        return {".png": stream.getvalue()}


def palette(classes: int) -> NDArray[np.uint8]:
    """A colour for each class, (K, 3): the first is black, the others are bright and distinct."""
    import matplotlib as mpl

    steps = np.arange(classes)
    hues = np.stack([(0.08 + _HUES * steps) % 1, 0.55 + 0.4 * (steps % 2), 0.95 - 0.2 * (steps // 2 % 2)], axis=1)
    colours = np.rint(255 * mpl.colors.hsv_to_rgb(hues)).astype(np.uint8)
    colours[:1] = 0
    return colours


def palette_image(mask: Labels, classes: int) -> Image.Image:
    """A mask as a picture whose values are the class indices, with a palette to view it; above 256 classes 16-bit."""
    from PIL import Image

    if classes > 256:
        return Image.fromarray(mask.astype(np.uint16))
    picture = Image.frombytes("P", (mask.shape[1], mask.shape[0]), mask.astype(np.uint8).tobytes())
    picture.putpalette(palette(max(classes, 1)).tobytes())
    return picture


def mask_layer(mask: Labels, classes: tuple[str, ...]) -> Image.Image:
    """A mask as a transparent picture to lay over its image; a first class that is the background is left out."""
    from PIL import Image

    colours = np.zeros((len(classes) + 1, 4), np.uint8)
    colours[1:, :3] = palette(len(classes) + 1)[1:]  # of the classes; the first colour is black, for nothing
    colours[1:, 3] = round(255 * OPACITY)
    if classes and classes[0].lower() in GROUNDS:
        colours[1, 3] = 0
    return Image.fromarray(colours[mask.astype(np.int64) + 1])
