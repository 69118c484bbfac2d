"""Folders of images: one folder per class, optionally in one folder per split; without labels, any tree of images."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

import numpy as np

from vitrail.data.dataset import Array, FileSplit, Found, Targets, reads_labels
from vitrail.data.images import EXTENSIONS, ImageFacts
from vitrail.data.verify import verify_files
from vitrail.errors import UserError, shortlist
from vitrail.files import reading
from vitrail.progress import log
from vitrail.tasks import Multiclass, Task

T = TypeVar("T")

_MOST_UNREADABLE = 0.01

SPLITS = {  # all accepted names
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
    "testing": "test",
}


def open_folder(root: Path, task: type[Task] | None = None) -> Found:
    """The images of class folders, or, for a task that reads no labels, all images below the folder."""
    folders = split_folders(root)
    if reads_labels(task):
        files = {split: _class_files(folder) for split, folder in folders.items()}
    else:
        files = {split: {"": _all_files(folder)} for split, folder in folders.items()}
        _mention_ignored(root, folders)
    return from_files(root.resolve().name, files, root)


def from_files(
    name: str, files: Mapping[str, Mapping[str, Sequence[Path]]], source: object, verify: bool = True
) -> Found:
    """The files of each split and class, verified to be readable."""
    classes = tuple(sorted({label for by_class in files.values() for label in by_class}))
    parts: dict[str, tuple[Array, Targets]] = {}
    for split, by_class in files.items():
        listed = [by_class.get(label, ()) for label in classes]
        targets = np.repeat(np.arange(len(classes), dtype=np.int64), [len(paths) for paths in listed])
        parts[split] = np.array([path for paths in listed for path in paths], dtype=object), targets
    found = from_paths(name, Multiclass(classes), parts, verify)
    if "train" in parts and len(classes) > 1:
        lost = np.setdiff1d(parts["train"][1], found.parts["train"][1])
        if len(lost):
            raise UserError(
                f"No image of the class '{classes[lost[0]]}' in {source} can be read. Repair them, or remove the class."
            )
    return found


def from_paths(name: str, task: Task, listed: Mapping[str, tuple[Array, Targets]], verify: bool = True) -> Found:
    """Verifies that the files of each split can be read, and skips the few that cannot.

    Without `verify`, no file is opened, all are kept, and their sizes are unknown.
    """
    every = [path for paths, _ in listed.values() for path in paths]
    answers = verify_files(every) if verify else [ImageFacts(1, 1, False)] * len(every)
    facts = {path: answer for path, answer in zip(every, answers, strict=True) if isinstance(answer, ImageFacts)}
    unreadable = tuple((str(path), why) for path, why in zip(every, answers, strict=True) if isinstance(why, str))
    leave_out(unreadable, len(every))
    parts = {}
    for split, (paths, targets) in listed.items():
        good = np.array([path in facts for path in paths], dtype=bool)
        parts[split] = paths[good], targets[good]
    h, w = (int(np.median(sides)) for sides in zip(*((fact.h, fact.w) for fact in facts.values()), strict=True))
    channels, bits = channels_and_bits(facts)
    return Found(
        name=name,
        task=task,
        parts=parts,
        make=lambda _, paths, targets: FileSplit(tuple(paths), targets, channels, bits),
        size=(h, w),
        channels=channels,
        unreadable=unreadable,
        bits=bits,
    )


def channels_and_bits(facts: Mapping[T, ImageFacts]) -> tuple[int, int]:
    """The channels and bits to read all images with; raises UserError if channels differ."""
    first: dict[str, T] = {}
    for place, fact in facts.items():
        first.setdefault(fact.kind, place)
    if len(first) > 1:
        (one, a), (other, b) = list(first.items())[:2]
        raise UserError(
            f"All images must have the same channels, but {a} is {one} and {b} is {other}. Convert or remove some."
        )
    some_fact = next(iter(facts.values()))
    channels = some_fact.bands or (1 if all(fact.grey for fact in facts.values()) else 3)
    return channels, max(fact.bits for fact in facts.values())


def split_folders(root: Path) -> dict[str, Path]:
    """The folder of each split, or the given folder as the train split."""
    folders = subfolders(root)
    found: dict[str, Path] = {}
    for folder in folders:
        split = SPLITS.get(folder.name.lower())
        if split in found:
            raise UserError(f"{root} has two {split} splits, {found[split].name} and {folder.name}. Remove one.")
        if split:
            found[split] = folder
    # Next to other folders, a "train" without subfolders is a class: images of trains.
    if found and (len(found) == len(folders) or ("train" in found and subfolders(found["train"]))):
        return found
    return {"train": root}


def named_splits(splits: Iterable[str], source: str) -> dict[str, str]:
    """Their split names by ours. A single split of unknown name is train; otherwise unknown names are skipped."""
    theirs = list(splits)
    if len(theirs) == 1:
        return {SPLITS.get(theirs[0].lower(), "train"): theirs[0]}
    named: dict[str, str] = {}
    for name in theirs:
        split = SPLITS.get(name.lower())
        if split is None:
            log.info("%s: skipping the split '%s', which is none of train, val and test.", source, name)
        elif split in named:
            raise UserError(f"{source} has two {split} splits. Rename one.")
        else:
            named[split] = name
    if not named:
        raise UserError(f"{source} must have splits named train, validation or test, but has {', '.join(theirs)}.")
    return named


def _class_files(folder: Path) -> dict[str, list[Path]]:
    """The image files of each class: all below its folder."""
    loose = _loose(folder)
    classes = subfolders(folder)
    if not classes:
        if loose:
            raise UserError(
                f"{folder} holds images but no class folders: every class needs its own folder, as in "
                f"{folder / 'cat' / '1.jpg'} and {folder / 'dog' / '2.jpg'}."
            )
        raise UserError(f"{folder} has no images. It must hold one folder of images per class.")
    if loose:
        log.warning("Ignored %d images in %s that are in no class folder.", loose, folder)
    files = {child.name: sorted(images_below(child, stop), key=Path.as_posix) for child in classes}
    for name, paths in files.items():
        if not paths:
            raise UserError(
                f"The class folder {folder / name} has no images ({', '.join(sorted(EXTENSIONS))}). "
                "Add some, or remove the folder."
            )
    return files


def _all_files(folder: Path) -> list[Path]:
    """All image files below a folder."""
    files = sorted(images_below(folder, stop), key=Path.as_posix)
    if not files:
        raise UserError(
            f"{folder} has no images ({', '.join(sorted(EXTENSIONS))}). Add some, or give the folder that has them."
        )
    return files


def _mention_ignored(root: Path, folders: Mapping[str, Path]) -> None:
    """Warns of images that are in none of the split folders."""
    if root in folders.values():
        return
    others = [child for child in subfolders(root) if child not in folders.values()]
    if ignored := _loose(root) + sum(1 for child in others for _ in images_below(child, stop)):
        names = " or ".join(folder.name for folder in folders.values())
        log.warning("Ignored %d images in %s that are not in %s.", ignored, root, names)


def _loose(folder: Path) -> int:
    """The number of images in a folder that are in none of its subfolders."""
    return sum(is_image(child.name) for child in folder.iterdir() if child.is_file())


def subfolders(folder: Path) -> list[Path]:
    """The subfolders of a folder, sorted by name, without hidden ones."""
    return sorted(
        (child for child in folder.iterdir() if child.is_dir() and not child.name.startswith(".")),
        key=lambda child: child.name,
    )


def is_image(name: str | Path) -> bool:
    """Whether a file has an image extension and is not hidden."""
    path = Path(name)
    return not path.name.startswith(".") and path.suffix.lower() in EXTENSIONS


def images_below(folder: str | Path, onerror: Callable[[OSError], object]) -> Iterator[Path]:
    """Yields the image files below a folder, one directory at a time, without hidden ones."""
    return filter(is_image, files_below(folder, onerror))


def files_below(folder: str | Path, onerror: Callable[[OSError], object]) -> Iterator[Path]:
    """Yields the files below a folder, one directory at a time, without hidden ones."""
    seen = set()
    for here, folders, names in os.walk(folder, followlinks=True, onerror=onerror):
        real = Path(here).resolve()
        if real in seen:  # a circular link
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(here, name) for name in sorted(names) if not name.startswith("."))


def check_regular(path: Path) -> None:
    """Raises UserError if a file, or one below a folder, is a FIFO or a device: other libraries would wait for ever."""
    with reading(path, "a folder of files"):
        for file in files_below(path, stop) if path.is_dir() else [path]:
            if not file.is_file():
                raise UserError(f"{file} is not a regular file. Remove it.")


def stop(error: OSError) -> NoReturn:
    raise error


def leave_out(unreadable: Sequence[tuple[str, str]], count: int) -> None:
    """Warns which of `count` images are skipped and why; raises UserError if there are too many."""
    if not unreadable:
        return
    share = len(unreadable) / count
    names: dict[str, list[str]] = {}
    for name, reason in unreadable:
        names.setdefault(reason, []).append(name)
    which = "; ".join(f"{shortlist(found, 10)} ({reason})" for reason, found in list(names.items())[:5])
    if share > _MOST_UNREADABLE:
        remedy = "Install what they need" if any("pip install" in reason for reason in names) else "Repair"
        raise UserError(
            f"{len(unreadable)} of {count} images ({share:.1%}) cannot be read, and at most {_MOST_UNREADABLE:.0%} may "
            f"be unreadable: {which}. {remedy} or remove them."
        )
    log.warning("%d of %d images cannot be read and are left out: %s.", len(unreadable), count, which)
