"""Data sets with boxes: Pascal VOC XML, COCO JSON, YOLO text files, and tables with box columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from vitrail.data.boxes.coco import read_coco
from vitrail.data.boxes.instances import read_instances
from vitrail.data.boxes.marked import Marked, summary, tidied
from vitrail.data.boxes.voc import is_voc, read_voc
from vitrail.data.boxes.yolo import read_yolo, yolo_file
from vitrail.data.coco import coco_files
from vitrail.data.dataset import Array, Found, Problem, Targets
from vitrail.data.displayed import as_displayed
from vitrail.data.folder import from_paths
from vitrail.data.images import ImageFacts
from vitrail.data.verify import verify_files
from vitrail.errors import UserError
from vitrail.progress import log
from vitrail.tasks.boxes import RARE, Boxes
from vitrail.tasks.placement import object_array


def open_boxes(path: Path, values: Sequence[str] | None = None, asked: bool = False) -> Found | None:
    """The images and boxes of a file or folder, verified; None if it has no boxes, or is a table.

    `values` are those of --mask-values, which boxes have not. Instances in masks are read only if boxes are asked for.
    """
    marked = marked_images(path)
    if marked is None and asked and path.is_dir():
        marked = read_instances(path)
        if marked is None:
            raise UserError(
                f"{path} has no boxes: there must be annotations in the form of Pascal VOC, COCO or YOLO, a table with "
                "a row per box, or masks with a number per object."
            )
    if marked is None:
        return None
    if values is not None:
        raise UserError(f"--mask-values is for images with masks, but {path} has boxes. Remove it.")
    return from_marked(path.resolve().stem, list(marked), path)


def marked_images(path: Path) -> Iterable[Marked] | None:
    """The images of a data set with boxes, read one after the other; None if it is none."""
    if (file := yolo_file(path)) is not None:
        return read_yolo(file)
    if files := coco_files(path):
        return read_coco(files)
    return read_voc(path) if path.is_dir() and is_voc(path) else None


def from_marked(name: str, marked: Sequence[Marked], source: object) -> Found:
    """The data set of marked images; problems of boxes that were repaired are logged."""
    if not marked:
        raise UserError(f"{source} has no images. Add some.")
    doubled = first_double(marked)
    if doubled is not None:
        raise UserError(f"{doubled.image} is listed twice in {source}. Join its annotations.")
    classes = tuple(sorted({thing.name for image in marked for thing in image.objects}))
    paths = [image.image for image in marked]
    facts = {path: fact for path, fact in zip(paths, verify_files(paths), strict=True) if isinstance(fact, ImageFacts)}
    targets: dict[Path, Array] = {image.image: np.zeros((0, 6), np.float32) for image in marked}
    problems: list[Problem] = []
    for image, boxes, faults in tidied(marked, facts, classes):
        targets[image.image] = boxes
        problems += faults
    listed: dict[str, tuple[Array, Targets]] = {}
    for split in dict.fromkeys(image.split for image in marked):
        own = [image.image for image in marked if image.split == split]
        listed[split] = object_array(own), object_array([targets[path] for path in own])
    if text := summary(problems, sum(len(image.objects) for image in marked), source):
        log.warning("Boxes of %s: %s. `vitrail check` lists them.", source, text)
    drawn = [(image, facts[image.image]) for image in marked if image.objects and image.image in facts]
    turned = as_displayed([(image.image, fact, image.sized) for image, fact in drawn], "boxes", source)
    task = Boxes(classes)
    found = from_paths(name, task, listed)
    counts = task.objects(np.concatenate([part[1] for part in found.parts.values()]))
    rare = [
        Problem("box_rare", f"'{classes[k]}' has {counts[k]} boxes", str(source)) for k in np.flatnonzero(counts < RARE)
    ]
    return replace(found, problems=(*problems, *rare, *turned))


def first_double(marked: Sequence[Marked]) -> Marked | None:
    """The first image that is listed twice."""
    seen: set[Path] = set()
    for image in marked:
        if image.image in seen:
            return image
        seen.add(image.image)
    return None
