"""The answer of a detection model for one image: boxes with labels, as text, tables, COCO's JSON and a picture."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from vitrail.tasks.answer import Answer
from vitrail.tasks.box_picture import COLOURS, draw

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True)
class BoxesAnswer(Answer):
    """Objects, best first; corners in pixels of the image."""

    boxes: tuple[tuple[float, ...], ...] = ()  # x0, y0, x1, y1
    size: tuple[int, int] = (0, 0)  # of the image
    classes: tuple[str, ...] = ()  # of the model, for colours

    form: ClassVar[str] = "boxes"

    def text(self, digits: int = 1, width: int = 0) -> str:
        counts = Counter(self.labels)
        return ", ".join(f"{count} {name}" for name, count in counts.most_common()) or "(no object)"

    def columns(self) -> list[str]:
        return ["label", "probability", "x0", "y0", "x1", "y1"]

    def rows(self) -> list[list[str]]:
        """One row per object, as in a table to train on; an empty one if there is none."""
        listed = zip(self.labels, self.probabilities, self.boxes, strict=True)
        return [[label, f"{share:.6f}", *(f"{side:.2f}" for side in box)] for label, share, box in listed] or [[""] * 6]

    def detections(self) -> list[dict[str, Any]]:
        return [
            {
                "category_id": self.classes.index(label),
                "bbox": [x0, y0, round(x1 - x0, 2), round(y1 - y0, 2)],
                "score": share,
            }
            for label, share, (x0, y0, x1, y1) in zip(self.labels, self.probabilities, self.boxes, strict=True)
        ]

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | {"boxes": self.boxes}

    def scores(self) -> list[float]:
        """The score of the strongest box of each class."""
        best = dict(zip(reversed(self.labels), reversed(self.probabilities), strict=True))
        return [best.get(name, 0.0) for name in self.classes]

    def above(self, threshold: float) -> Answer:
        count = sum(probability >= threshold for probability in self.probabilities)  # in descending order
        return BoxesAnswer(
            self.labels[:count], self.probabilities[:count], (), self.boxes[:count], self.size, self.classes
        )

    def layer(self) -> Image.Image | None:
        """The boxes with their labels on a transparent picture of the image's size."""
        from PIL import Image

        colours = {name: COLOURS[k % len(COLOURS)] for k, name in enumerate(self.classes)}
        listed = zip(self.labels, self.probabilities, self.boxes, strict=True)
        marks = [(box, colours[label], f"{label} {share:.0%}") for label, share, box in listed]
        return draw(Image.new("RGBA", self.size[::-1]), marks)
