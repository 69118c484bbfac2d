"""COCO JSON: `images`, `annotations` with boxes as x, y, width, height in pixels, and `categories`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vitrail.data.boxes.marked import Marked, Object, number
from vitrail.data.coco import image_of
from vitrail.errors import UserError, shortlist, shown
from vitrail.files import ANNOTATIONS, read_json, reading

_KEYS = ("images", "annotations", "categories")


def read_coco(files: Mapping[str, Path]) -> Iterator[Marked]:
    for split, file in files.items():
        document = read_json(file, "valid JSON", ANNOTATIONS)
        with reading(file, "a COCO file"):
            found = list(_read(document, file, split))
        yield from found


def _read(document: Any, file: Path, split: str) -> Iterator[Marked]:
    for key in _KEYS:
        if not isinstance(document, dict) or not isinstance(document.get(key), list):
            raise UserError(f"{file} must have a list '{key}', as COCO's files have.")
    names = {_field(each, "id", file): str(_field(each, "name", file)) for each in document["categories"]}
    if len(set(names.values())) < len(names):
        twice = next(name for name in names.values() if list(names.values()).count(name) > 1)
        raise UserError(f"{file} has two categories named '{twice}'. Rename one.")
    by_image: dict[Any, list[Object]] = {_field(each, "id", file): [] for each in document["images"]}
    if len(by_image) < len(document["images"]):
        raise UserError(f"{file} has two images with the same id. Every image needs its own.")
    for each in document["annotations"]:
        image, kind, box = (_field(each, key, file) for key in ("image_id", "category_id", "bbox"))
        if image not in by_image:
            raise UserError(f"{file}: an annotation is of image {shown(image)}, which is not in 'images'. Remove it.")
        if kind not in names:
            raise UserError(
                f"{file}: an annotation has category {shown(kind)}, which is not in 'categories': "
                f"{shortlist([*map(str, names)], 5)}."
            )
        if not isinstance(box, list) or len(box) != 4:
            raise UserError(f"{file}: 'bbox' must be [x, y, width, height], but it is {shown(box)}.")
        x, y, w, h = (number(value, "a value of 'bbox'", str(file)) for value in box)
        area = None if each.get("area") is None else number(each["area"], "'area'", str(file))
        by_image[image].append(Object(names[kind], (x, y, x + w, y + h), bool(each.get("iscrowd")), area))
    for each in document["images"]:
        name = str(_field(each, "file_name", file))
        size = None
        if each.get("height") and each.get("width"):
            size = int(number(each["height"], "'height'", str(file))), int(number(each["width"], "'width'", str(file)))
        yield Marked(image_of(file, name, split), split, by_image[each["id"]], f"{file}, image {each['id']}", size)


def _field(entry: Any, key: str, file: Path) -> Any:
    if not isinstance(entry, dict) or key not in entry:
        raise UserError(f"{file}: an entry has no '{key}': {shown(entry)}.")
    return entry[key]
