"""Images with masks: the layouts of folders, the values of all masks, and the annotations of a segmentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.coco import coco_files
from vitrail.data.dataset import Array, Found, Targets
from vitrail.data.displayed import as_displayed
from vitrail.data.folder import from_paths, leave_out
from vitrail.data.images import ImageFacts
from vitrail.data.masks.layouts import Pairs, Pictures, find_masks
from vitrail.data.masks.polygons import coco
from vitrail.data.masks.raw import DrawnMask, MaskCell, MaskFile, RawMask
from vitrail.data.masks.values import Classes, Layout, Mask, Seen, decide, survey
from vitrail.data.orientation import SIDEWAYS
from vitrail.data.packed import PackedPart, from_stores
from vitrail.data.verify import verify, verify_files
from vitrail.errors import UserError, shown
from vitrail.progress import log
from vitrail.tasks import Masks
from vitrail.tasks.placement import object_array

__all__ = ["named_masks", "open_masks", "unnamed_masks", "verified"]


def open_masks(root: Path, values: Sequence[str] | None = None, asked: bool = False) -> Found | None:
    """The images and masks of a folder, verified; None if it has no masks and they were not asked for.

    `values` are those of --mask-values. COCO's JSON files, which have boxes too, are read only if masks are asked for.
    """
    if not root.is_dir() and not (asked and root.suffix.lower() == ".json"):
        return None
    found = (find_masks(root) if root.is_dir() else None) or (_coco(root) if asked else None)
    if found is None:
        if asked:
            raise UserError(
                f"{root} has no masks: there must be a folder of images and one of masks, as in images/1.jpg and "
                "masks/1.png, or a layout of VOC, ADE20K, Cityscapes, CamVid, CVAT, LabelMe or COCO."
            )
        if values is not None:
            raise UserError(f"--mask-values is for images with masks, but {root} has none.")
        return None
    return from_pictures(root.resolve().stem if root.is_file() else root.resolve().name, found, values, root)


def from_pictures(name: str, found: Pictures, values: Sequence[str] | None, source: object) -> Found:
    """Images and masks as a data set: all masks are read, and must have the size of their images."""
    parts = {split: _readable(pairs) for split, pairs in found.parts.items()}
    every = [each for part in parts.values() for each in part]
    if not every:
        raise UserError(f"{source} has no images with masks.")
    seen = [each.seen for each in every]
    classes = decide([each.mask for each in every], seen, values, found.layout, source)
    names = classes.names if values is not None else _used(classes, seen, found.layout)
    classes = _kept(classes, names)
    listed: dict[str, tuple[Array, Targets]] = {}
    for split, part in parts.items():
        paths = np.array([each.image for each in part], dtype=object)
        listed[split] = paths, object_array([Mask(each.mask, classes, each.seen) for each in part])
    turned = as_displayed([(each.image, each.fact, True) for each in every], "masks", source)
    return replace(from_paths(name, Masks(classes.names), listed), problems=turned)


def unnamed_masks(name: str, stores: Mapping[str, tuple[Any, Any, int]], source: object) -> Found:
    """Images and masks in rows, by split: the stores of both and their number; `named_masks` gives the classes."""
    parts = {}
    for split, (images, masks, count) in stores.items():
        facts = verify(range(count), images.inspect, images.identity())
        targets = object_array([MaskCell(masks, row, fact) for row, fact in enumerate(facts)])
        parts[split] = PackedPart(images, targets, facts)
    return from_stores(name, Masks(()), parts, source)


def named_masks(found: Found, values: Sequence[str] | None, source: object) -> Found:
    """The same data with the classes of all values of its masks, which must have the size of their images."""
    every: list[RawMask] = [mask for _, targets in found.parts.values() for mask in targets]
    facts = [mask.image for mask in every if isinstance(mask, MaskCell) and isinstance(mask.image, ImageFacts)]
    seen = survey(every)
    for mask, why in zip(every, seen, strict=True):
        if isinstance(why, str):
            raise UserError(f"The mask {mask.name} cannot be read: {why}.")
    every, looks = _aligned(every, [look for look in seen if isinstance(look, Seen)], facts)
    classes = decide(every, looks, values, Layout(), source)
    turned = as_displayed([(m.name, fact, True) for m, fact in zip(every, facts, strict=True)], "masks", source)
    masks = iter([Mask(raw, classes, look) for raw, look in zip(every, looks, strict=True)])
    parts: dict[str, tuple[Array, Targets]] = {}
    for split, (items, targets) in found.parts.items():
        parts[split] = items, object_array([next(masks) for _ in targets])
    return replace(found, task=Masks(classes.names), parts=parts, problems=turned)


def _used(classes: Classes, seen: Sequence[Seen], layout: Layout) -> tuple[str, ...]:
    """The classes of a published layout that the masks have: a part of VOC may lack some."""
    if not layout.names:
        return classes.names
    there = {classes.number(value) for each in seen for value in each.pixels}
    return tuple(name for k, name in enumerate(classes.names) if k in there)


def _kept(classes: Classes, names: tuple[str, ...]) -> Classes:
    """Classes with only these names."""
    if names == classes.names:
        return classes
    places = {k: names.index(name) for k, name in enumerate(classes.names) if name in names}
    table = {value: places.get(k, -1) for value, k in classes.table.items()}
    return replace(classes, names=names, table=table)


@dataclass(frozen=True)
class _Readable:
    """An image and its mask, with what was seen of both."""

    image: Path
    mask: RawMask
    seen: Seen
    fact: ImageFacts


def _readable(pairs: Pairs) -> list[_Readable]:
    """The images and masks that can be read; raises UserError for sizes that differ."""
    pairs, facts = verified(pairs)
    seen = survey([mask for _, mask in pairs])
    leave_out([(m.name, why) for (_, m), why in zip(pairs, seen, strict=True) if isinstance(why, str)], len(pairs))
    found = [
        _Readable(image, mask, look, fact)
        for (image, mask), look, fact in zip(pairs, seen, facts, strict=True)
        if isinstance(look, Seen)
    ]
    facts = [each.fact for each in found]
    masks, looks = _aligned([each.mask for each in found], [each.seen for each in found], facts)
    return [replace(each, mask=mask, seen=look) for each, mask, look in zip(found, masks, looks, strict=True)]


def _aligned(
    masks: Sequence[RawMask], seen: Sequence[Seen], facts: Sequence[ImageFacts]
) -> tuple[list[RawMask], list[Seen]]:
    """The masks, rotated like their images if they have the size of the stored pixels; other sizes raise UserError."""
    masks, seen = list(masks), list(seen)
    turned = 0
    for i, (mask, look, fact) in enumerate(zip(masks, seen, facts, strict=True)):
        if _is_stored(look.size, fact) and isinstance(mask, MaskFile | MaskCell | DrawnMask):
            masks[i], seen[i] = replace(mask, turn=fact.turn), replace(look, size=(fact.h, fact.w))
            turned += 1
    if turned:
        log.info("%d images are rotated by their EXIF data, and their masks with them.", turned)
    _check_sizes(masks, [look.size for look in seen], facts)
    return masks, seen


def _is_stored(size: tuple[int, int], fact: ImageFacts) -> bool:
    """Whether a size is that of the stored pixels of an image, which EXIF data rotate by 90°."""
    return fact.turn in SIDEWAYS and size == (fact.w, fact.h) != (fact.h, fact.w)


def verified(pairs: Pairs) -> tuple[Pairs, list[ImageFacts]]:
    """The pairs whose image can be read, with its facts.

    Raises UserError if polygons lie on an image of another size, before memory is taken for the size that they state.
    """
    facts = verify_files([path for path, _ in pairs])
    unreadable = [(str(path), why) for (path, _), why in zip(pairs, facts, strict=True) if isinstance(why, str)]
    leave_out(unreadable, len(pairs))
    pairs = [pair for pair, fact in zip(pairs, facts, strict=True) if isinstance(fact, ImageFacts)]
    known = [fact for fact in facts if isinstance(fact, ImageFacts)]
    masks = [mask for _, mask in pairs]
    sizes = [
        mask.size if isinstance(mask, DrawnMask) and not _is_stored(mask.size, fact) else None
        for mask, fact in zip(masks, known, strict=True)
    ]
    _check_sizes(masks, sizes, known)
    return pairs, known


def _check_sizes(
    masks: Sequence[RawMask], sizes: Sequence[tuple[int, int] | None], facts: Sequence[ImageFacts]
) -> None:
    odd = [
        (mask, fact, size)
        for mask, fact, size in zip(masks, facts, sizes, strict=True)
        if size is not None and size != (fact.h, fact.w)
    ]
    if odd:
        mask, fact, (h, w) = odd[0]
        raise UserError(
            f"Masks must have the size of their images, but {mask.name} is {shown(h)}x{shown(w)} and its image "
            f"{fact.h}x{fact.w} ({len(odd)} of {len(masks)} differ). Resize the masks without interpolation (nearest)."
        )


def _coco(path: Path) -> Pictures | None:
    """COCO JSON files: one, or one per split with its name in the file's or the folder's."""
    files = coco_files(path) or ({"train": path} if path.is_file() else coco_files(path, "*.json"))
    parts: dict[str, Pairs] = {}
    layout = Layout()
    for split, file in files.items():
        pairs, found = coco(file, split)
        if layout.names and layout.names != found.names:
            raise UserError(f"The COCO files of {path} must have the same categories, but {file.name} has others.")
        parts[split], layout = pairs, found
    return Pictures(parts, layout) if parts else None
