"""YOLO text files: `images/train/x.jpg` and `labels/train/x.txt`, a line `class cx cy w h` per object, as shares.

`data.yaml` names the classes and the folders of the splits. An image without a text file has no objects. Longer lines
are polygons, whose bounds are the box.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vitrail.config import read_yaml
from vitrail.data.boxes.marked import Marked, Object, number
from vitrail.data.folder import SPLITS, files_below, is_image, stop
from vitrail.errors import UserError, shown
from vitrail.files import open_regular, read_lines, reading

_EDGE = 1e-3  # by which a share may exceed 1: rounding of tools
_YAML = (".yaml", ".yml")
_LONGEST = 2**20  # bytes of such a file
_OTHERS = 100_000  # files that are not images, more than which are walked only among many images


def yolo_file(path: Path) -> Path | None:
    """The `data.yaml` of a data set; None if it is none."""
    if path.is_file():
        return path if path.suffix.lower() in _YAML else None
    named = [file for file in sorted(path.glob("*.y*ml")) if file.suffix.lower() in _YAML and file.is_file()]
    return next((file for file in named if _has_names(file)), None)


def _has_names(file: Path) -> bool:
    with reading(file, "a YAML file"), open_regular(file) as opened:
        return b"names:" in opened.read(_LONGEST)


def read_yolo(file: Path) -> Iterator[Marked]:
    document = read_yaml(file)
    if not isinstance(document, dict) or "names" not in document:
        raise UserError(f"{file} must have 'names', the classes, and 'train' and 'val', the folders of the images.")
    names = _names(document["names"], file)
    if "nc" in document and document["nc"] != len(names):
        raise UserError(f"{file}: 'nc' is {shown(document['nc'])}, but there are {len(names)} 'names'.")
    splits = {SPLITS[key]: value for key, value in document.items() if key in SPLITS and value}
    if not splits:
        raise UserError(f"{file} must name the folder of the images of a split, such as 'train: images/train'.")
    for split, given in splits.items():
        for folder in given if isinstance(given, list) else [given]:
            with reading(file, "a data.yaml of YOLO"):
                images = _images(file, document.get("path"), str(folder), split)
            for image in images:
                label = label_of(image)
                yield Marked(image, split, list(_objects(label, names)), str(label), shares=True)


def _names(names: Any, file: Path) -> dict[int, str]:
    if isinstance(names, Mapping) and all(isinstance(key, int) for key in names):
        return {key: str(name) for key, name in names.items()}
    if isinstance(names, list):
        return {key: str(name) for key, name in enumerate(names)}
    raise UserError(f"{file}: 'names' must be a list of classes, or a number for each, but it is {shown(names)}.")


def _images(file: Path, root: Any, folder: str, split: str) -> list[Path]:
    """The images of a split: below a folder, or listed in a text file."""
    roots = [file.parent / str(root or ""), file.parent, file.parent.parent]
    places = [base / folder for base in roots] + [file.parent / folder.removeprefix("../")]
    place = next((place for place in places if place.exists()), None)
    if place is None:
        raise UserError(f"{file}: the folder of {split}, {folder}, does not exist. Correct 'path' or '{split}'.")
    if place.is_file():
        return [place.parent / line for line in read_lines(place, "a list of images") if line]
    images: list[Path] = []
    for count, path in enumerate(files_below(place, stop), 1):
        if is_image(path):
            images.append(path)
        elif count > max(_OTHERS, 10 * len(images)):  # 'train: /' would walk the whole disk
            raise UserError(
                f"{file}: {place} is not a folder of images: it has {len(images):,} among {count:,} files. Correct "
                f"'path' or '{split}'."
            )
    return images


def label_of(image: Path) -> Path:
    """The text file of an image: in `labels` instead of the last `images` of its path."""
    parts = list(image.parts)
    for i in range(len(parts) - 2, -1, -1):
        if parts[i] == "images":
            parts[i] = "labels"
            break
    return Path(*parts).with_suffix(".txt")


def _objects(file: Path, names: Mapping[int, str]) -> Iterator[Object]:
    if not file.is_file():
        return
    for row, line in enumerate(read_lines(file, "a list of boxes"), 1):
        words, where = line.split(), f"{file}, line {row}"
        if not words:
            continue
        if len(words) < 5 or (len(words) > 6 and len(words) % 2 == 0):
            raise UserError(f"{where} must be 'class cx cy w h' or a polygon, but it has {len(words)} values.")
        kind, *values = (number(word, "a value", where) for word in words)
        if kind not in names:
            raise UserError(
                f"{where}: class {kind:g} is not among the {len(names)} names of data.yaml, counted from 0."
            )
        if max(values) > 1 + _EDGE and len(words) <= 6:
            raise UserError(f"{where}: values must be shares of the image, from 0 to 1, but one is {max(values):g}.")
        if len(words) <= 6:  # a sixth value is a confidence
            cx, cy, w, h = values[:4]
            yield Object(names[int(kind)], (cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2))
        else:
            xs, ys = values[::2], values[1::2]
            yield Object(names[int(kind)], (min(xs), min(ys), max(xs), max(ys)))
