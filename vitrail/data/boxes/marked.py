"""Images with their boxes as a file gives them, and what is wrong with them.

Every reader yields `Marked` images. `tidied` turns them into arrays of boxes in pixels; what can be repaired without
doubt is repaired and reported, what would teach wrong boxes raises UserError.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.data.dataset import Problem
from vitrail.data.images import ImageFacts
from vitrail.errors import UserError, shown

Boxes = NDArray[np.float32]  # n 6: class, x0, y0, x1, y1, ignored; n 7 if annotations state areas

_FURTHEST = 1e9  # pixels
_OUTSIDE = 1.0  # pixels by which a box may exceed the image without mention: rounding of tools
_MOST_BAD = 0.2  # share of boxes that may be left out


@dataclass(frozen=True)
class Object:
    """One annotated object."""

    name: str  # of its class
    box: tuple[float, float, float, float]  # x0, y0, x1, y1
    ignored: bool = False  # COCO's crowds, VOC's difficult objects
    area: float | None = None  # in pixels, if the annotation states it: that of a mask, by which COCO measures size


@dataclass(frozen=True)
class Marked:
    """An image file and its objects."""

    image: Path
    split: str
    objects: Sequence[Object]
    where: str  # the file of the annotation, for messages
    size: tuple[int, int] | None = None  # height and width that the annotation states
    shares: bool = False  # boxes are shares of the image's sides, not pixels

    @property
    def sized(self) -> bool:
        """Whether the annotation states the size of its image."""
        return self.size is not None and 0 not in self.size


def number(value: Any, what: str, where: str) -> float:
    """A number of an annotation: a coordinate, a size or a class."""
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not math.isfinite(found):
        raise UserError(f"{where}: {what} must be a number, but it is {shown(value)}.")
    if abs(found) > _FURTHEST:
        raise UserError(f"{where}: {what} must be at most {_FURTHEST:g}, but it is {found:g}.")
    return found


def tidied(
    marked: Sequence[Marked], facts: Mapping[Path, ImageFacts], classes: Sequence[str]
) -> Iterator[tuple[Marked, Boxes, list[Problem]]]:
    """The boxes of each readable image, in pixels and inside it, with the problems they had."""
    numbers = {name: k for k, name in enumerate(classes)}
    stated = any(thing.area is not None for image in marked for thing in image.objects)
    for image in marked:
        if (fact := facts.get(image.image)) is None:
            continue
        _check_size(image, fact)
        problems: list[Problem] = []
        rows: list[tuple[float, ...]] = []
        areas: list[float] = []
        for thing in image.objects:
            box, faults = _tidy(thing, image.shares, fact)
            row = None if box is None else (numbers[thing.name], *box, float(thing.ignored))
            if row in rows:
                faults = {**faults, "box_twice": "is listed twice"}
            elif box is not None and row is not None:
                rows.append(row)
                x0, y0, x1, y1 = box
                areas.append((x1 - x0) * (y1 - y0) if thing.area is None else thing.area)
            problems += [Problem(kind, f"{_text(thing)} {fault}", image.where) for kind, fault in faults.items()]
        boxes = np.array(rows, np.float32).reshape(-1, 6)
        yield image, np.column_stack([boxes, np.array(areas, np.float32)]) if stated else boxes, problems


def _tidy(
    thing: Object, shares: bool, fact: ImageFacts
) -> tuple[tuple[float, float, float, float] | None, dict[str, str]]:
    """The box of an object inside the image, None if nothing is left of it, and its faults by kind."""
    x0, y0, x1, y1 = thing.box
    if shares:
        x0, y0, x1, y1 = x0 * fact.w, y0 * fact.h, x1 * fact.w, y1 * fact.h
    faults: dict[str, str] = {}
    if x0 == x1 or y0 == y1:
        return None, {"box_empty": "has no area"}
    if x0 > x1 or y0 > y1:
        faults["box_swapped"] = "has its corners swapped"
        (x0, x1), (y0, y1) = sorted((x0, x1)), sorted((y0, y1))
    if x0 >= fact.w or y0 >= fact.h or x1 <= 0 or y1 <= 0:
        return None, {"box_outside": f"is outside the image of {fact.w}x{fact.h}"}
    if min(x0, y0) < -_OUTSIDE or x1 > fact.w + _OUTSIDE or y1 > fact.h + _OUTSIDE:
        faults["box_border"] = f"extends beyond the image of {fact.w}x{fact.h}"
    return (max(x0, 0.0), max(y0, 0.0), min(x1, float(fact.w)), min(y1, float(fact.h))), faults


def _check_size(image: Marked, fact: ImageFacts) -> None:
    if image.size is None or not image.sized or image.size == (fact.h, fact.w) or not image.objects:
        return
    h, w = image.size
    if image.size == (fact.w, fact.h):
        raise UserError(
            f"{image.image} is {fact.w}x{fact.h} after its EXIF rotation, but {image.where} says {w}x{h}: the boxes "
            "lie on the unrotated image. Rotate the pixels and remove the EXIF tag, or annotate the upright image."
        )
    raise UserError(
        f"{image.image} is {fact.w}x{fact.h}, but {image.where} says {w}x{h}, so its boxes lie elsewhere. Use "
        "the images that were annotated, or scale the boxes."
    )


def summary(problems: Sequence[Problem], boxes: int, source: object) -> str:
    """A sentence on the problems of a data set; raises UserError if too many boxes are lost."""
    lost = [p for p in problems if p.kind in ("box_empty", "box_outside")]
    if len(lost) > _MOST_BAD * max(boxes, 1):
        raise UserError(
            f"{len(lost)} of {boxes} boxes of {source} have no area or lie outside their image: {lost[0].detail} in "
            f"{lost[0].file}. Check the order of the coordinates, and whether they are pixels or shares."
        )
    words = {
        "box_empty": "without area left out",
        "box_outside": "outside the image left out",
        "box_swapped": "with swapped corners repaired",
        "box_border": "cut off at the border",
        "box_twice": "listed twice counted once",
    }
    counts = Counter(problem.kind for problem in problems)
    return ", ".join(f"{counts[kind]} {text}" for kind, text in words.items() if counts[kind])


def _text(thing: Object) -> str:
    return f"'{thing.name}' at " + ", ".join(f"{value:g}" for value in thing.box)
