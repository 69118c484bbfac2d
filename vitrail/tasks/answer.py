"""Answers of a model for single images, and what reports say of many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from vitrail.errors import UserError

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True)
class Answer:
    """A model's answer for one image: ranked labels with their probabilities."""

    labels: tuple[str, ...] = ()
    probabilities: tuple[float, ...] = ()
    values: tuple[float, ...] = ()  # of a regression, in the units of the data

    form: ClassVar[str] = "probabilities"  # how a page shows it: also labels, values, areas or boxes

    def text(self, digits: int = 1, width: int = 0) -> str:
        """The answer on one line; the first label is padded to `width`."""
        if not self.labels:
            return "(no label)"
        shares = [f"{probability:.{digits}%}" for probability in self.probabilities]
        if not width:
            return ", ".join(f"{label} {share}" for label, share in zip(self.labels, shares, strict=True))
        others = ", ".join(f"{label} {share}" for label, share in zip(self.labels[1:], shares[1:], strict=True))
        return f"{self.labels[0].ljust(width)}  {shares[0]:>6}  {others}".rstrip()

    def columns(self) -> list[str]:
        """The columns of such answers in a CSV file."""
        names = ["label", "probability"]
        for i in range(2, len(self.labels) + 1):
            names += [f"label_{i}", f"probability_{i}"]
        return names

    def cells(self) -> list[str]:
        """The values of these columns."""
        pairs = zip(self.labels, self.probabilities, strict=True)
        return [cell for label, share in pairs for cell in (label, f"{share:.6f}")]

    def rows(self) -> list[list[str]]:
        """The rows of an image in a CSV file: usually one."""
        return [self.cells()]

    def detections(self) -> list[dict[str, Any]]:
        """The objects in the form of COCO's results, without their image."""
        raise UserError("COCO's results need boxes, but the model predicts none. Use another --format.")

    def to_json(self) -> dict[str, Any]:
        return {"labels": self.labels, "probabilities": self.probabilities}

    def scores(self) -> list[float]:
        """One number per class, in class order, of an answer with a place: such as the share of the area."""
        return []

    def layer(self) -> Image.Image | None:
        """A transparent picture of the image's size to lay over it, such as a mask or boxes; None if there is none."""
        return None

    def files(self) -> dict[str, bytes]:
        """Files to write for the image, by suffix, such as the mask as ".png"."""
        return {}

    def above(self, threshold: float) -> Answer:
        """The answer without labels of a lower probability."""
        count = sum(probability >= threshold for probability in self.probabilities)  # in descending order
        return LabelsAnswer(self.labels[:count], self.probabilities[:count])


@dataclass(frozen=True)
class Confused:
    """A frequent mistake: a class predicted as another, or a label missed or wrongly predicted."""

    true: str
    said: str
    count: int
    of: int  # images on which it could have occurred
    numbers: tuple[int, ...]  # indices of examples


@dataclass(frozen=True)
class Headline:
    """A report's first sentence: text, score, text."""

    before: str
    score: str
    after: str


class LabelsAnswer(Answer):
    """Any number of labels, those above their thresholds, in two CSV cells."""

    form: ClassVar[str] = "labels"

    def columns(self) -> list[str]:
        return ["labels", "probabilities"]

    def cells(self) -> list[str]:  # in the format of a table to train on
        return ["|".join(self.labels), "|".join(f"{share:.6f}" for share in self.probabilities)]


class Health(NamedTuple):
    """Whether features differ between images."""

    healthy: bool | None  # None: there are too few images to tell
    sentence: str
    problem: str = ""  # its name, if there is one
