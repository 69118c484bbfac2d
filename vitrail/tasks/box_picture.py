"""Boxes drawn over pictures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from vitrail.tasks.scores import Array

if TYPE_CHECKING:
    from PIL import Image

# By class; distinct on light and dark pictures.
COLOURS = ("#e6194b", "#4363d8", "#3cb44b", "#f58231", "#911eb4", "#42d4f4", "#f032e6", "#9a6324", "#808000", "#000075")
RIGHT, MISSED, WRONG = "#2ca02c", "#ff9e1b", "#e0218a"  # of a comparison with the truth

Mark = tuple[Sequence[float], str, str]  # corners in pixels of the picture, colour, words


def draw(picture: Image.Image, marks: Iterable[Mark]) -> Image.Image:
    """Draws boxes with their words on a picture, in place; the first on top."""
    from PIL import ImageDraw, ImageFont

    side = max(picture.size)
    pen, line = ImageDraw.Draw(picture), max(round(side / 250), 1)
    font = ImageFont.load_default(size=max(side / 45, 9))
    for box, colour, words in reversed(list(marks)):
        pen.rectangle(tuple(box), outline=colour, width=line)
        if words:
            place = max(box[0], 0) + line, max(box[1], 0) + line
            left, top, right, bottom = pen.textbbox(place, words, font=font)
            pen.rectangle((left - line, top - line, right + line, bottom + line), fill=colour)
            pen.text(place, words, fill="white", font=font)
    return picture


def compared(
    size: tuple[int, int], found: Array, objects: Array, pairs: Sequence[tuple[int, int]], classes: Sequence[str]
) -> tuple[Image.Image, Image.Image]:
    """Right, missed and wrong boxes, each in its colour, and all objects in that of their class: two layers."""
    from PIL import Image

    marks: list[Mark] = []
    for d, g in sorted(pairs, key=lambda pair: pair[0] >= 0 and pair[1] >= 0):  # mistakes on top
        if d < 0:
            marks.append((objects[g, 1:5].tolist(), MISSED, classes[int(objects[g, 0])]))
        else:
            words = "" if g >= 0 else classes[int(found[d, 5])]
            marks.append((found[d, :4].tolist(), RIGHT if g >= 0 else WRONG, words))
    truth: list[Mark] = [
        (row[1:5].tolist(), COLOURS[int(row[0]) % len(COLOURS)], classes[int(row[0])]) for row in objects
    ]
    empty = (Image.new("RGBA", size[::-1]) for _ in range(2))
    return draw(next(empty), marks), draw(next(empty), truth)
