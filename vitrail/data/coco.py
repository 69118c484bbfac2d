"""The files of a COCO data set: its JSON files by split, and where their images are.

A single file, or one per split: `annotations/instances_train2017.json` with images in `train2017/` or
`images/train2017/`, or `train/_annotations.coco.json` next to the images, as Roboflow exports it.
"""

from __future__ import annotations

import re
from pathlib import Path

from vitrail.data.folder import SPLITS
from vitrail.errors import UserError
from vitrail.files import open_regular, reading

_OBJECTS = "instances"  # how COCO's own files of objects begin, beside those of captions and keypoints


def coco_files(path: Path, inside: str = "_annotations.coco.json") -> dict[str, Path]:
    """The annotation file of each split; empty if there is none. `inside` is its name in the folder of a split."""
    if path.is_file():
        return {"train": path} if path.suffix.lower() == ".json" and is_coco(path) else {}
    files = {*path.glob("*.json"), *path.glob("annotations/*.json"), *path.glob(f"*/{inside}")}
    found: dict[str, Path] = {}
    for file in sorted((file for file in files if is_coco(file)), key=lambda file: (not _of_objects(file), file)):
        folder = "" if file.parent == path else file.parent.name
        words = re.findall("[a-z]+", f"{file.stem} {folder}".lower())
        split = next((SPLITS[word] for word in words if word in SPLITS), "train")
        if split not in found:
            found[split] = file
        elif _of_objects(file) or not _of_objects(found[split]):
            raise UserError(f"{path} has two {split} annotations, {found[split].name} and {file.name}. Remove one.")
    return found


def _of_objects(file: Path) -> bool:
    return file.name.startswith(_OBJECTS)


def is_coco(file: Path) -> bool:
    """Whether a JSON file begins with the keys of COCO's objects."""
    with reading(file, "a JSON file"), open_regular(file) as opened:
        start = opened.read(2**16)
    return b'"images"' in start or b'"annotations"' in start or b'"categories"' in start


def image_of(file: Path, name: str, split: str) -> Path:
    """The image of an entry: next to the file, or in the folders that people use."""
    words = re.findall(r"\w+", file.stem.removeprefix(f"{_OBJECTS}_"))
    roots = (file.parent, file.parent.parent)
    places = [place for root in roots for place in (root, root / "images", *(root / word for word in words))]
    places += [root / "images" / word for root in roots for word in (*words, split)] + [root / split for root in roots]
    for place in places:
        for asked in (Path(name), Path(Path(name).name)):
            if (place / asked).is_file():
                return place / asked
    return file.parent / name  # reading it will give the reason
