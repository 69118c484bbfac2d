"""COCO JSON: `images`, `annotations` with boxes as x, y, width, height in pixels, and `categories`.

A single file, or one per split: `annotations/instances_train2017.json` with images in `train2017/` or
`images/train2017/`, or `train/_annotations.coco.json` next to the images, as Roboflow exports it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vitrail.data.boxes.marked import Marked, Object, number
from vitrail.data.folder import SPLITS
from vitrail.errors import UserError, shortlist, shown
from vitrail.files import ANNOTATIONS, open_regular, read_json, reading

_KEYS = ("images", "annotations", "categories")


def coco_files(path: Path) -> dict[str, Path]:
    """The annotation file of each split; empty if there is none."""
    if path.is_file():
        return {"train": path} if path.suffix.lower() == ".json" and is_coco(path) else {}
    files = [*path.glob("*.json"), *path.glob("annotations/*.json"), *path.glob("*/_annotations.coco.json")]
    found: dict[str, Path] = {}
    for file in sorted(file for file in files if is_coco(file)):
        words = re.findall("[a-z]+", (file.parent.name if file.name.startswith("_") else file.stem).lower())
        split = next((SPLITS[word] for word in words if word in SPLITS), "train")
        if split in found:
            raise UserError(f"{path} has two {split} annotations, {found[split].name} and {file.name}. Remove one.")
        found[split] = file
    return found


def is_coco(file: Path) -> bool:
    """Whether a JSON file begins with the keys of COCO's objects."""
    with reading(file, "a JSON file"), open_regular(file) as opened:
        start = opened.read(2**16)
    return b'"images"' in start or b'"annotations"' in start or b'"categories"' in start


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
        yield Marked(_image(file, name, split), split, by_image[each["id"]], f"{file}, image {each['id']}", size)


def _field(entry: Any, key: str, file: Path) -> Any:
    if not isinstance(entry, dict) or key not in entry:
        raise UserError(f"{file}: an entry has no '{key}': {shown(entry)}.")
    return entry[key]


def _image(file: Path, name: str, split: str) -> Path:
    """The image of an entry: next to the file, or in the folders that people use."""
    words = re.findall(r"\w+", file.stem.removeprefix("instances_"))
    roots = (file.parent, file.parent.parent)
    places = [place for root in roots for place in (root, root / "images", *(root / word for word in words))]
    places += [root / "images" / word for root in roots for word in (*words, split)] + [root / split for root in roots]
    for place in places:
        for asked in (Path(name), Path(Path(name).name)):
            if (place / asked).is_file():
                return place / asked
    return file.parent / name  # reading it will give the reason
