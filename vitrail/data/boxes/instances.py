"""Boxes from instance masks: a picture of numbers per image, 0 for the background and one number per object."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitrail.data.boxes.marked import Marked, Object
from vitrail.data.masks import verified
from vitrail.data.masks.layouts import Pairs, find_masks
from vitrail.data.masks.raw import COLOUR
from vitrail.data.masks.values import WHITE, are_instances
from vitrail.data.pixels import UnreadableImage
from vitrail.errors import UserError
from vitrail.progress import log

CLASS = "object"  # masks of instances say nothing of classes
_LARGE = 0.1  # share of a value's pixels from which a separate region is an object, not a stray
_MOST_SCATTERED = 0.25  # share of values in several regions, for occluded objects
_REMEDY = "Give every object its own number, for example with scipy.ndimage.label"


def read_instances(root: Path) -> Iterator[Marked] | None:
    """The objects of a folder with images and masks; None if it has no masks."""
    found = find_masks(root)
    if found is None:
        return None
    if found.layout.names:
        raise UserError(
            f"The masks of {root} have one value per class, as in {found.layout.title.rstrip(',')}, but --task boxes "
            f"needs one number per object. {_REMEDY}, or train on the masks: --task masks."
        )
    return _read(found.parts, root)


def _read(parts: Mapping[str, Pairs], root: Path) -> Iterator[Marked]:
    from scipy.ndimage import find_objects

    numbers: list[set[int]] = []  # of each mask
    scattered = 0
    for split, pairs in parts.items():
        for image, mask in verified(pairs)[0]:
            try:
                values = mask.values()
            except UnreadableImage as error:
                raise UserError(f"{mask.name} cannot be read: {error}.") from error
            if values.size and values.max() >= COLOUR:
                raise UserError(f"{mask.name} has colours, but masks of instances need one number per object.")
            boxes = {k: place for k, place in enumerate(find_objects(values.astype("int32")), 1) if place is not None}
            numbers.append({*boxes})
            scattered += sum(_is_scattered(values[place] == k) for k, place in boxes.items())
            objects = [Object(CLASS, (x.start, y.start, x.stop, y.stop)) for y, x in boxes.values()]
            yield Marked(image, split, objects, mask.name, (values.shape[0], values.shape[1]))
    _check_numbers(numbers, scattered, root)


def _is_scattered(region: NDArray[np.bool_]) -> bool:
    """Whether the pixels of a value are several separate regions."""
    from scipy.ndimage import label

    sizes = np.sort(np.bincount(label(region, np.ones((3, 3)))[0].ravel())[1:])
    return len(sizes) > 1 and bool(sizes[-2] >= _LARGE * sizes.sum())


def _check_numbers(numbers: Sequence[set[int]], scattered: int, root: Path) -> None:
    """Raises UserError if values are of classes, so that one box would be around all objects of a class."""
    if set().union(*numbers) == {WHITE}:
        raise UserError(
            f"The masks of {root} have the values 0 and 255, but --task boxes needs one number per object, from 1. "
            f"{_REMEDY}, or train on the masks: --mask-values 0=ground,255=object."
        )
    count = sum(map(len, numbers))
    if scattered > _MOST_SCATTERED * count and not are_instances(numbers):
        raise UserError(
            f"The masks of {root} look like class indices: {scattered} of {count} values are in several separate "
            f"regions of a mask, but --task boxes needs one number per object. {_REMEDY}, or train on the masks: "
            "--task masks."
        )
    if scattered:
        log.warning(
            "%d of %d objects in the masks of %s are in several regions, and their box is around all of them.",
            scattered,
            count,
            root,
        )
