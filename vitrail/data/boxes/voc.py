"""Pascal VOC XML: one file per image in `Annotations` or next to the image; splits in `ImageSets/Main`.

VOC itself counts pixels from 1; labelling tools, which write the same files, count from 0.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from vitrail.data.boxes.marked import Marked, Object, number
from vitrail.data.folder import SPLITS, is_image, split_folders
from vitrail.errors import UserError
from vitrail.files import read_bytes, read_lines, reading

_CORNERS = ("xmin", "ymin", "xmax", "ymax")


def is_voc(root: Path) -> bool:
    """Whether a folder has annotations in VOC's form."""
    if (root / "Annotations").is_dir():
        return any(file.suffix.lower() == ".xml" for file in (root / "Annotations").iterdir())
    return any(_beside(child) for child in root.iterdir() if child.is_dir() and child.name.lower() in SPLITS)


def _beside(folder: Path) -> bool:
    """Whether XML files lie next to images, as Roboflow exports them."""
    names = {child.suffix.lower() for child in folder.iterdir() if child.is_file()}
    return ".xml" in names and any(is_image(f"x{suffix}") for suffix in names)


def read_voc(root: Path) -> Iterator[Marked]:
    if not (root / "Annotations").is_dir():
        for split, folder in split_folders(root).items():
            for file in sorted(folder.glob("*.xml")):
                yield _read(file, folder, file.stem, split)
        return
    for split, names in _lists(root).items():
        for name in names:
            file = root / "Annotations" / f"{name}.xml"
            if not file.is_file():
                raise UserError(f"{root / 'ImageSets'} lists {name}, but {file} does not exist. Remove the line.")
            yield _read(file, root / "JPEGImages", name, split)


def _lists(root: Path) -> dict[str, list[str]]:
    """The names of the images of each split; without lists, all are for training."""
    folder = root / "ImageSets" / "Main"
    found = {
        file.stem.lower(): [name for line in read_lines(file, "a list of images") for name in line.split()]
        for file in folder.glob("*.txt")
    }
    lists = {SPLITS[name]: names for name, names in found.items() if name in SPLITS and names}
    if "train" not in lists and "trainval" in found:
        lists["train"] = found["trainval"]
    if lists:
        return lists
    return {"train": sorted(file.stem for file in (root / "Annotations").glob("*.xml"))}


def _read(file: Path, folder: Path, stem: str, split: str) -> Marked:
    with reading(file, "valid XML"):
        content = read_bytes(file)
        if b"<!ENTITY" in content.replace(b"\0", b""):  # which may expand without end; also in UTF-16
            raise ValueError("it defines entities, which annotations do not need")
        tree = ElementTree.fromstring(content)
    if tree.tag != "annotation":
        raise UserError(f"{file} must be an <annotation>, as in Pascal VOC, but it is a <{tree.tag[:80]}>.")
    first = 1.0 if "VOC" in (tree.findtext("source/database") or "") else 0.0
    objects = []
    for item in tree.iter("object"):
        name, bounds = (item.findtext("name") or "").strip(), item.find("bndbox")
        if not name or bounds is None:
            raise UserError(f"{file}: an <object> needs a <name> and a <bndbox>, but one has {_missing(name)}.")
        x0, y0, x1, y1 = (number(bounds.findtext(corner), f"<{corner}>", str(file)) for corner in _CORNERS)
        ignored = (item.findtext("difficult") or "0").strip() == "1"
        objects.append(Object(name, (x0 - first, y0 - first, x1, y1), ignored))
    size = tree.findtext("size/height"), tree.findtext("size/width")
    stated = (
        None
        if None in size
        else (int(number(size[0], "<height>", str(file))), int(number(size[1], "<width>", str(file))))
    )
    return Marked(_image(file, folder, stem, tree.findtext("filename")), split, objects, str(file), stated)


def _missing(name: str) -> str:
    return "no <bndbox>" if name else "no <name>"


def _image(file: Path, folder: Path, stem: str, named: str | None) -> Path:
    """The image of an annotation: of the same name, or the one that it names."""
    named = Path((named or "").replace("\\", "/")).name
    for place in (folder, file.parent, file.parent.parent, file.parent.parent / "images"):
        if named and is_image(named) and (place / named).is_file():
            return place / named
        for found in sorted(place.glob(f"{glob.escape(stem)}.*")) if place.is_dir() else []:
            if is_image(found):
                return found
    raise UserError(
        f"{file} has no image: neither {folder / (named or stem + '.jpg')} nor another file of its name exists."
    )
