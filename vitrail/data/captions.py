"""Images with captions: folders of `x.jpg` with `x.txt`, and COCO's captions in JSON."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.dataset import Array, Found, Targets
from vitrail.data.folder import from_paths, images_below, split_folders, stop
from vitrail.errors import UserError, shortlist, shown
from vitrail.files import ANNOTATIONS, open_regular, read_json, read_lines, reading
from vitrail.tasks import task_type
from vitrail.tasks.captions import joined

_FIRST = 100  # images of a folder that show what it holds
_NUMBERS = re.compile(r"[\d\s.+\-eE]*")  # a line of boxes of a detector, not words


def has_captions(folder: Path) -> bool:
    """Whether half or more of the first images below a folder have captions in text files beside them."""
    first = list(islice(images_below(folder, lambda _: None), _FIRST))
    files = [file for image in first if (file := image.with_suffix(".txt")).is_file()]
    if not files or 2 * len(files) < len(first):
        return False
    lines = next((found for file in files if any(found := read_lines(file, "a text file"))), [])
    return not all(map(_NUMBERS.fullmatch, lines))


def open_captioned(root: Path) -> Found:
    """The images of a folder, or of its split folders, each with a text file of the same name: a caption per line."""
    listed = {}
    for split, folder in split_folders(root).items():
        paths = sorted(images_below(folder, stop), key=Path.as_posix)
        listed[split] = paths, [_caption(path) for path in paths]
    return _found(root.resolve().name, listed, str(root), "Add a .txt file beside it")


def is_coco_captions(path: Path) -> bool:
    """Whether a file is COCO's JSON with captions, not with boxes."""
    if path.suffix.lower() != ".json" or not path.is_file():
        return False
    with reading(path, "a JSON file"), open_regular(path) as file:
        content = file.read(ANNOTATIONS)
    return b'"caption"' in content and b'"bbox"' not in content


def open_coco(path: Path, image_dir: str | None = None) -> Found:
    """The images and captions of a COCO file; images are in `image_dir`, by default the folder of the file."""
    document = read_json(path, most=ANNOTATIONS)
    rule = "a COCO captions file, with 'images' (id, file_name) and 'annotations' (image_id, caption)"
    with reading(path, rule):
        names = {image["id"]: _text(image, "file_name") for image in document["images"]}
        if len(names) < len(document["images"]):
            raise ValueError("two images have the same id")
        captions: dict[Any, list[str]] = {number: [] for number in names}
        for each in document["annotations"]:
            if each["image_id"] not in captions:
                raise ValueError(f"no image has the id {shown(each['image_id'])} of an annotation")
            captions[each["image_id"]].append(_text(each, "caption"))
    folder = path.parent if image_dir is None else Path(image_dir).expanduser()
    files = [folder / name for name in names.values()]
    if files and not any(file.exists() for file in files):
        raise UserError(
            f"None of the images of {path} exist: {files[0]} is the first. Set --image-dir to their folder."
        )
    texts = [joined(its) for its in captions.values()]
    return _found(path.stem, {"train": (files, texts)}, str(path), "Add one to 'annotations'")


def _text(entry: Any, name: str) -> str:
    text = entry[name]
    if not isinstance(text, str):
        raise TypeError(f"a {name} is {shown(text)}")
    return text


def _caption(image: Path) -> str:
    file = image.with_suffix(".txt")
    return joined(read_lines(file, "UTF-8 text")) if file.is_file() else ""


def _found(name: str, listed: dict[str, tuple[list[Path], list[str]]], where: str, remedy: str) -> Found:
    """Images and their captions, one text each; every image must have one."""
    missing = [
        str(path) for paths, texts in listed.values() for path, text in zip(paths, texts, strict=True) if not text
    ]
    if missing:
        some = f"{len(missing)} images of {where} have no caption" if len(missing) > 1 else "An image has no caption"
        raise UserError(f"{some}: {shortlist(missing, 3)}. {remedy}, or remove the image.")
    task, targets = task_type("pairs").from_text({"caption": _all(listed)}, range(len(_all(listed))), where)
    parts: dict[str, tuple[Array, Targets]] = {}
    at = 0
    for split, (paths, _) in listed.items():
        parts[split] = np.array(paths, dtype=object), targets[at : at + len(paths)]
        at += len(paths)
    return from_paths(name, task, parts)


def _all(listed: dict[str, tuple[list[Path], list[str]]]) -> Sequence[str]:
    return [text for _, texts in listed.values() for text in texts]
