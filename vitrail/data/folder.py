"""Folders of images: a folder for every class, in a folder for every split or not."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import numpy as np

from vitrail.data.dataset import Array, FileSplit, Found, Numbers
from vitrail.data.images import EXTENSIONS, ImageFacts, UnreadableImage, inspect_image
from vitrail.errors import UserError, some
from vitrail.progress import log, track

_MOST_UNREADABLE = 0.01

SPLITS = {  # by every spelling
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
    "testing": "test",
}


def open_folder(root: Path) -> Found:
    files = {split: _class_files(folder) for split, folder in split_folders(root).items()}
    return from_files(root.resolve().name, files, root)


def from_files(name: str, files: Mapping[str, Mapping[str, Sequence[Path]]], source: Path) -> Found:
    """Proves that the files of every split and class can be read, and leaves out the few that cannot."""
    classes = tuple(sorted({label for by_class in files.values() for label in by_class}))
    every = [path for by_class in files.values() for paths in by_class.values() for path in paths]
    facts, unreadable = _inspect(every)
    for label, paths in files.get("train", {}).items():
        if not any(path in facts for path in paths):
            raise UserError(
                f"No image of the class '{label}' in {source} can be read. Repair them, or remove the class."
            )
    parts: dict[str, tuple[Array, Numbers]] = {}
    for split, by_class in files.items():
        kept = [[path for path in by_class.get(label, ()) if path in facts] for label in classes]
        targets = np.repeat(np.arange(len(classes), dtype=np.int64), [len(paths) for paths in kept])
        parts[split] = np.array([path for paths in kept for path in paths], dtype=object), targets
    h, w = (int(np.median(sides)) for sides in zip(*((fact.h, fact.w) for fact in facts.values()), strict=True))
    channels, bits = _channels_and_bits(facts)
    return Found(
        name=name,
        classes=classes,
        parts=parts,
        make=lambda _, paths, targets: FileSplit(tuple(paths), targets, channels, bits),
        size=(h, w),
        channels=channels,
        unreadable=tuple((str(path), reason) for path, reason in unreadable),
        bits=bits,
    )


def _channels_and_bits(facts: Mapping[Path, ImageFacts]) -> tuple[int, int]:
    """What all images have, or can be read as having; a UserError if they do not go together."""
    first: dict[str, Path] = {}
    for path, fact in facts.items():
        first.setdefault(fact.kind, path)
    if len(first) > 1:
        (one, a), (other, b) = list(first.items())[:2]
        raise UserError(
            f"All images must have the same channels, but {a} is {one} and {b} is {other}. Remove one kind."
        )
    some_fact = next(iter(facts.values()))
    channels = some_fact.bands or (1 if all(fact.grey for fact in facts.values()) else 3)
    return channels, max(fact.bits for fact in facts.values())


def split_folders(root: Path) -> dict[str, Path]:
    """The folder of every split, or the whole folder as the train split."""
    folders = subfolders(root)
    found: dict[str, Path] = {}
    for folder in folders:
        split = SPLITS.get(folder.name.lower())
        if split in found:
            raise UserError(f"{root} has two {split} splits, {found[split].name} and {folder.name}. Remove one.")
        if split:
            found[split] = folder
    # Where other folders lie beside it, a "train" without folders in it is a class: pictures of trains.
    if found and (len(found) == len(folders) or ("train" in found and subfolders(found["train"]))):
        return found
    return {"train": root}


def _class_files(folder: Path) -> dict[str, list[Path]]:
    """The image files of every class: all those below the folder that bears its name."""
    loose = sum(is_image(child.name) for child in folder.iterdir() if child.is_file())
    classes = subfolders(folder)
    if not classes:
        if loose:
            raise UserError(
                f"{folder} holds images but no class folders: every class needs a folder of its own, as in "
                f"{folder / 'cat' / '1.jpg'} and {folder / 'dog' / '2.jpg'}."
            )
        raise UserError(f"{folder} has no images. It must hold one folder of images for every class.")
    if loose:
        log.warning("%d images in %s lie beside the class folders and are left out.", loose, folder)
    files = {child.name: sorted(images_below(child, _stop), key=Path.as_posix) for child in classes}
    for name, paths in files.items():
        if not paths:
            raise UserError(
                f"The class folder {folder / name} has no images ({', '.join(sorted(EXTENSIONS))}). "
                "Put some into it, or remove it."
            )
    return files


def subfolders(folder: Path) -> list[Path]:
    """The folders in a folder by name, without hidden ones."""
    return sorted(
        (child for child in folder.iterdir() if child.is_dir() and not child.name.startswith(".")),
        key=lambda child: child.name,
    )


def is_image(name: str | Path) -> bool:
    """Whether a file is called as an image is, and not hidden."""
    path = Path(name)
    return not path.name.startswith(".") and path.suffix.lower() in EXTENSIONS


def images_below(folder: str | Path, onerror: Callable[[OSError], object]) -> Iterator[Path]:
    """Image files in a folder and those below it, one folder listed at a time; hidden ones are left out."""
    return filter(is_image, files_below(folder, onerror))


def files_below(folder: str | Path, onerror: Callable[[OSError], object]) -> Iterator[Path]:
    """Files in a folder and those below it, one folder listed at a time; hidden ones are left out."""
    seen = set()
    for here, folders, names in os.walk(folder, followlinks=True, onerror=onerror):
        real = Path(here).resolve()
        if real in seen:  # a link to where we have been
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(here, name) for name in sorted(names) if not name.startswith("."))


def _stop(error: OSError) -> NoReturn:
    raise error


def _inspect(files: Sequence[Path]) -> tuple[dict[Path, ImageFacts], list[tuple[Path, str]]]:
    """The facts of every readable file, and the other files with reasons; a UserError if they are many."""
    facts: dict[Path, ImageFacts] = {}
    unreadable: list[tuple[Path, str]] = []
    step = 1024  # as many as are handed to the threads at a time: a million would need much memory
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        answers = (answer for at in range(0, len(files), step) for answer in pool.map(_look, files[at : at + step]))
        for path, answer in zip(files, track(answers, "checking images", total=len(files), unit="img"), strict=True):
            if isinstance(answer, ImageFacts):
                facts[path] = answer
            else:
                unreadable.append((path, answer))
    count, share = len(unreadable), len(unreadable) / len(files)
    reasons = [f"{path} ({reason})" for path, reason in unreadable]
    if share > _MOST_UNREADABLE:
        raise UserError(
            f"{count} of {len(files)} images ({share:.1%}) cannot be read; at most {_MOST_UNREADABLE:.0%} "
            f"may be so: {some(reasons, 3)}. Remove or repair them."
        )
    if unreadable:
        log.warning("%d of %d images cannot be read and are left out: %s.", count, len(files), some(reasons, 10))
    return facts, unreadable


def _look(path: Path) -> ImageFacts | str:
    try:
        return inspect_image(path)
    except UnreadableImage as error:
        return str(error)
