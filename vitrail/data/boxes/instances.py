"""Boxes from instance masks: a picture of numbers per image, 0 for the background and one number per object."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from vitrail.data.boxes.marked import Marked, Object
from vitrail.data.masks import verified
from vitrail.data.masks.layouts import Pairs, find_masks
from vitrail.data.masks.raw import COLOUR
from vitrail.data.pixels import UnreadableImage
from vitrail.errors import UserError

CLASS = "object"  # masks of instances say nothing of classes


def read_instances(root: Path) -> Iterator[Marked] | None:
    """The objects of a folder with images and masks; None if it has no masks."""
    found = find_masks(root)
    return None if found is None else _read(found.parts)


def _read(parts: Mapping[str, Pairs]) -> Iterator[Marked]:
    from scipy.ndimage import find_objects

    for split, pairs in parts.items():
        for image, mask in verified(pairs)[0]:
            try:
                values = mask.values()
            except UnreadableImage as error:
                raise UserError(f"{mask.name} cannot be read: {error}.") from error
            if values.size and values.max() >= COLOUR:
                raise UserError(f"{mask.name} has colours, but masks of instances need one number per object.")
            boxes = [place for place in find_objects(values.astype("int32")) if place is not None]
            objects = [Object(CLASS, (x.start, y.start, x.stop, y.stop)) for y, x in boxes]
            yield Marked(image, split, objects, mask.name, (values.shape[0], values.shape[1]))
