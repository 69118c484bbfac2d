"""Polygons as masks: LabelMe's and COCO's JSON files. Later objects lie on top of earlier ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitrail import files
from vitrail.data.coco import image_of
from vitrail.data.folder import is_image
from vitrail.data.masks.raw import DrawnMask, RawMask, Ring, Shape
from vitrail.data.masks.values import Layout
from vitrail.errors import UserError, shown

Pairs = list[tuple[Path, RawMask]]

GROUND = "background"  # what is in no polygon
_FURTHEST = 1e6  # pixels from the corner of an image
_LABELME = "a file of LabelMe"


def read_json(path: Path) -> dict[str, Any]:
    document = files.read_json(path, most=files.ANNOTATIONS)
    if not isinstance(document, dict):
        raise UserError(f"{path} must contain a JSON object, but it contains a {type(document).__name__}.")
    return document


# LabelMe ----------------------------------------------------------------------------------------------------


def labelme_folder(folder: Path) -> bool:
    """Whether a folder has JSON files of LabelMe beside its images."""
    found = sorted(folder.glob("*.json"))
    if not found or not any(is_image(child) for child in folder.iterdir()):
        return False
    try:
        document = files.read_json(found[0], most=files.ANNOTATIONS)
    except UserError:
        return False
    return isinstance(document, dict) and "shapes" in document


def labelme(folders: Mapping[str, Path]) -> tuple[dict[str, Pairs], Layout]:
    """The images of folders with the polygons in the JSON files beside them."""
    documents = {
        split: [(file, read_json(file)) for file in sorted(folder.glob("*.json"))] for split, folder in folders.items()
    }
    labels = set()
    for file, document in (each for part in documents.values() for each in part):
        with files.reading(file, _LABELME):
            labels |= {str(shape.get("label")) for shape in document.get("shapes", ())}
    names = (GROUND, *sorted(labels - {GROUND, "_background_", "__ignore__"}))
    values = {name: value for value, name in enumerate(names)} | {"_background_": 0, "__ignore__": 255}
    parts: dict[str, Pairs] = {}
    for split, part in documents.items():
        parts[split] = []
        for file, document in part:
            with files.reading(file, _LABELME):
                parts[split].append(_labelme_pair(file, document, values))
    return parts, Layout(dict(enumerate(names)), (255,), "LabelMe")


def _labelme_pair(file: Path, document: Any, values: Mapping[str, int]) -> tuple[Path, RawMask]:
    beside = [child for child in file.parent.glob(f"{file.stem}.*") if is_image(child)]
    named = file.parent / str(document.get("imagePath") or "").replace("\\", "/")
    image = beside[0] if beside else named
    if not image.is_file():
        raise UserError(f"{file} has no image: neither {file.stem}.* beside it nor its imagePath '{named.name}'.")
    shapes = []
    for shape in document.get("shapes", ()):
        points = shape.get("points") or []
        if shape.get("shape_type") == "rectangle" and len(points) == 2:
            (a, b), (c, d) = points
            points = [[a, b], [c, b], [c, d], [a, d]]
        if len(points) < 3:
            raise UserError(
                f"{file}: '{shape.get('label')}' is a {shape.get('shape_type', 'shape')} of {len(points)} points, not "
                "a polygon or rectangle. Draw it as a polygon."
            )
        ring = _ring([number for point in points for number in point])
        shapes.append(Shape(values[str(shape.get("label"))], (ring,)))
    h, w = document.get("imageHeight"), document.get("imageWidth")
    if not isinstance(h, int) or not isinstance(w, int):
        raise UserError(f"{file} has no imageHeight and imageWidth. Save it again with LabelMe.")
    return image, DrawnMask(str(file), (h, w), tuple(shapes))


# COCO -------------------------------------------------------------------------------------------------------


def coco(file: Path, split: str) -> tuple[Pairs, Layout]:
    """The images of a COCO JSON file of a split with their polygons and run lengths; category ids may have holes."""
    document = read_json(file)
    with files.reading(file, "a COCO file"):
        return _coco(file, document, split)


def _coco(file: Path, document: dict[str, Any], split: str) -> tuple[Pairs, Layout]:
    missing = [key for key in ("images", "annotations", "categories") if key not in document]
    if missing:
        raise UserError(f"{file} is not a COCO file: it has no '{missing[0]}'.")
    categories = {int(each["id"]): str(each["name"]) for each in document["categories"]}
    order = sorted(categories)
    names = (GROUND, *(categories[number] for number in order))
    shapes: dict[int, list[Shape]] = {}
    for each in document["annotations"]:
        if each.get("category_id") not in categories:
            raise UserError(
                f"{file}: annotation {shown(each.get('id'))} has the category {shown(each.get('category_id'))}, which "
                "'categories' does not list."
            )
        value = 1 + order.index(int(each["category_id"]))
        shapes.setdefault(int(each["image_id"]), []).append(_coco_shape(file, each, value))
    pairs: Pairs = []
    for image in document["images"]:
        path = image_of(file, str(image["file_name"]), split)
        if not path.is_file():
            raise UserError(
                f"{file} lists {shown(image['file_name'])}, which does not exist. Put the images into 'images', or "
                f"'{split}' for one split, next to the file or its folder."
            )
        size = int(image["height"]), int(image["width"])
        pairs.append((path, DrawnMask(f"{file}: {path.name}", size, tuple(shapes.get(int(image["id"]), ())))))
    return pairs, Layout(dict(enumerate(names)), (), "COCO")


def _coco_shape(file: Path, annotation: Any, value: int) -> Shape:
    region = annotation.get("segmentation")
    if isinstance(region, dict):
        runs = region.get("counts", ())
        return Shape(value, runs=runs.encode() if isinstance(runs, str) else tuple(int(run) for run in runs))
    if not region:
        number = shown(annotation.get("id"))
        raise UserError(f"{file}: annotation {number} has no segmentation, only a box. Use --task boxes.")
    return Shape(value, tuple(_ring(ring) for ring in region if len(ring) >= 6))


def _ring(numbers: Sequence[Any]) -> Ring:
    """A polygon of x, y, x, y, …; raises ValueError for numbers that are no places in an image."""
    ring = tuple(map(float, numbers))
    if len(ring) % 2 or not all(abs(number) <= _FURTHEST for number in ring):  # so that NaN fails too
        raise ValueError("a polygon must be pairs of coordinates in pixels")
    return ring
