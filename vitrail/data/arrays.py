"""Images and labels in NumPy arrays: an `.npz` file, pairs of `.npy` files, or in memory."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from vitrail.data.dataset import Array, ArraySplit, Found, MappedSplit, Numbers, Targets, reads_labels
from vitrail.data.folder import SPLITS
from vitrail.data.npy import check_stored, check_zip, declared, read_member
from vitrail.data.pixels import Pixels, bits_of
from vitrail.data.rows import GlobalRows
from vitrail.errors import UserError
from vitrail.files import open_regular, reading
from vitrail.progress import log
from vitrail.tasks import Multiclass, Task, other_tasks, task_type
from vitrail.tasks.infer import infer_from_arrays

# The images in an archive, and their labels.
_IN_ARCHIVE = {"x_train": "y_train", "x_val": "y_val", "x_test": "y_test", "images": "labels", "x": "y"}

# An archive that expands more than this, and beyond what is always allowed, is a zip bomb.
_MAX_RATIO = 100
_ALWAYS_ALLOWED = 2**30  # bytes


def open_npz(path: Path, task: type[Task] | None = None) -> Found:
    """An archive with x_train and y_train (and _val, _test), images and labels, or X and y; optionally classes."""
    found, arrays = _read_npz(path, images_only=not reads_labels(task))
    rule = "the arrays x_train and y_train (and _val, _test), or images and labels, or X and y"
    if not reads_labels(task):
        arrays |= {_IN_ARCHIVE[x]: _no_labels(images) for x, images in arrays.items()}
        rule, task = "the array x_train (and x_val, x_test), or images, or X", None
    parts = {}
    for split in ("train", "val", "test"):
        x, y = f"x_{split}", f"y_{split}"
        if x in arrays and y in arrays:
            parts[split] = arrays[x], arrays[y]
        elif x in arrays or y in arrays:
            raise UserError(f"{path} must contain both {x} and {y}, but it contains only one of them.")
    for x, y in (("images", "labels"), ("x", "y")):
        if not parts and x in arrays and y in arrays:
            parts["train"] = arrays[x], arrays[y]
    if not parts:
        raise UserError(f"{path} must contain {rule}, but it contains {', '.join(found) or 'none'}.")
    names = None
    if "classes" in arrays:
        names = _class_names(arrays["classes"], path)
    return from_arrays(path.stem, parts, names, str(path), task)


def _read_npz(path: Path, images_only: bool) -> tuple[list[str], dict[str, Array]]:
    """The names of all arrays, in lower case, and by name the arrays, or only those of images."""
    try:
        with reading(path, "a readable .npz file"), open_regular(path) as stream:
            if not zipfile.is_zipfile(stream):
                stream.seek(0)
                declared(stream)  # raises the error of a file that is no array
                raise UserError(f"{path} is a single array, not an .npz archive. Save it with np.savez.")
            check_zip(path, _MAX_RATIO, _ALWAYS_ALLOWED, "arrays of images")
            stream.seek(0)
            file = np.load(stream, allow_pickle=False)
            names = [name for name in file.files if not images_only or name.lower() in _IN_ARCHIVE]
            return [name.lower() for name in file.files], {name.lower(): read_member(file, name) for name in names}
    except UserError as error:
        if "allow_pickle" in str(error):
            raise UserError(
                f"{path} contains an array of Python objects, which is never loaded because it could run code. "
                "Save images as one uint8 array and class names as text (dtype str)."
            ) from error
        raise


# A word in the file name of images, and its replacement in the file name of their labels.
_PAIRS = (("images", "labels"), ("image", "label"), ("x", "y"))


def open_npy(path: Path, task: type[Task] | None = None) -> Found:
    """A file of images with its file of labels; a validation split is held out, even if the folder has others."""
    labels = _labels_path(path)
    if reads_labels(task) and (labels is None or not labels.is_file()):
        rule = "with 'y' for 'x' or 'labels' for 'images' in the name, as in x_train.npy and y_train.npy"
        reason = f"There is no {labels}." if labels else "Its name contains neither word: rename it."
        raise UserError(f"The labels of {path} must be in the same folder, {rule}. {reason}")
    others = [other.name for other in npy_images(path.parent) if other.name != path.name]
    if others:
        log.info("The folder of %s also has %s: give the folder to use its splits.", path.name, ", ".join(others))
    return _from_npy(path.stem, {"train": (path, labels)}, path, task)


def open_npy_folder(folder: Path, task: type[Task] | None = None) -> Found:
    """A folder of such pairs, one per split: x_train.npy and y_train.npy, x_val.npy and y_val.npy."""
    pairs: dict[str, tuple[Path, Path | None]] = {}
    for path in npy_images(folder):
        split = next((SPLITS[word] for word in _words(path) if word in SPLITS), "train")
        if split in pairs:
            raise UserError(
                f"{folder} has two files of {split} images: {pairs[split][0].name} and {path.name}. Keep one of them; "
                "if each is a single image, move them to a subfolder."
            )
        labels = _labels_path(path)
        assert labels is not None  # `npy_images` lists no others
        if reads_labels(task) and not labels.is_file():
            raise UserError(f"{path} has no labels: {labels.name} must be in the same folder.")
        pairs[split] = path, labels
    return _from_npy(folder.resolve().name, pairs, folder, task)


def npy_images(folder: Path) -> list[Path]:
    """The `.npy` files of images in a folder, recognised by name."""
    return sorted(path for path in folder.glob("*.npy") if _labels_path(path) is not None)


def _words(path: Path) -> list[str]:
    return re.split(r"[-_. ]", path.stem.lower())


def _labels_path(path: Path) -> Path | None:
    """The file with the labels of an image file, case-insensitive; None if its name is not one of images."""
    for x, y in _PAIRS:
        if x in _words(path):
            name = re.sub(rf"(?i)(?<![^-_. ]){x}(?![^-_. ])", y, path.name, count=1)
            matches = (other for other in path.parent.glob("*.npy") if other.name.lower() == name.lower())
            return next(matches, path.with_name(name))
    return None


def _from_npy(name: str, pairs: Mapping[str, tuple[Path, Path | None]], where: Path, task: type[Task] | None) -> Found:
    images = {split: _read_npy(x) for split, (x, _) in pairs.items()}
    if not reads_labels(task):
        return from_arrays(name, {split: (x, _no_labels(x)) for split, x in images.items()}, None, str(where))
    parts = {split: (images[split], _read_npy(y)) for split, (_, y) in pairs.items() if y is not None}
    names_file = where / "classes.npy" if where.is_dir() else where.with_name("classes.npy")
    names = _class_names(_read_npy(names_file), names_file) if names_file.exists() else None
    return from_arrays(name, parts, names, str(where), task)


def _read_npy(path: Path) -> Array:
    """The array of a file, memory-mapped."""
    try:
        with reading(path, "a complete .npy file"):
            with open_regular(path) as stream:
                shape, dtype = declared(stream)
                check_stored("it", (shape, dtype), path.stat().st_size - stream.tell())
            array: Array = np.lib.format.open_memmap(path, mode="r")  # type: ignore[no-untyped-call]
    except UserError as error:
        if "Python objects" in str(error):
            raise UserError(
                f"{path} contains Python objects, which are never loaded because they could run code. "
                "Save images as one uint8 array and class names as text (dtype str)."
            ) from error
        raise
    return array


def _no_labels(images: Array) -> Array:
    """The label "" for every image."""
    return np.zeros(images.shape[:1], np.str_)


def _class_names(array: Array, where: Path) -> tuple[str, ...]:
    names = tuple(_text(array.ravel(), f"{where}: classes must be text").tolist())
    if len(set(names)) < len(names):
        raise UserError(f"{where}: the names in classes must be unique.")
    return names


def from_arrays(
    name: str,
    parts: Mapping[str, tuple[Array, Array]],
    names: tuple[str, ...] | None,
    where: str,
    task: type[Task] | None = None,
) -> Found:
    """Validates images and labels and converts them to uint8 or uint16 (N, H, W, C) and targets.

    Unless the task is given, it is inferred: labels (N, K) of 0 and 1 are multi-label, floats are regression.
    """
    for split, (x, y) in parts.items():
        first = x.ndim == 4 and x.shape[1] < min(x.shape[2:])  # channels first, as in torch
        if x.ndim not in (3, 4) or first or 0 in x.shape[1:]:
            raise UserError(
                f"{where}: the {split} images must have the shape (N, height, width) or (N, height, width, "
                f"channels), but they have {x.shape}."
            )
        if y.shape[:1] != x.shape[:1]:
            raise UserError(
                f"{where}: the {split} split must have one label per image, but it has labels of shape {y.shape} for "
                f"{len(x)} images."
            )
    pixels = dict(zip(parts, _pixels([x for x, _ in parts.values()], where), strict=True))
    channels = {x.shape[3] for x in pixels.values()}
    if len(channels) > 1 and not channels <= {1, 3}:
        raise UserError(f"{where}: all splits must have the same number of channels, but they have {channels}.")
    read, targets = read_labels([y for _, y in parts.values()], names, where, task)
    h, w = next(iter(pixels.values())).shape[1:3]
    if any(isinstance(x, np.memmap) for x in pixels.values()):  # select rows instead of copying pixels
        mapped = GlobalRows([((x, f"{name}/{split}"), len(x)) for split, x in pixels.items()])

        def make(_: str, rows: Numbers, y: Targets) -> MappedSplit:
            (x, title), rows = mapped.locate(rows)
            return MappedSplit(x, rows, y, title)

        return Found(
            name=name,
            task=read,
            parts={split: (rows, y) for split, rows, y in zip(parts, mapped.rows(), targets, strict=True)},
            make=make,
            size=(h, w),
            channels=max(channels),
            bits=bits_of(next(iter(pixels.values()))),
        )
    return Found(
        name=name,
        task=read,
        parts={split: (pixels[split], y) for split, y in zip(parts, targets, strict=True)},
        make=lambda split, x, y: ArraySplit(x, y, f"{name}/{split}"),
        size=(h, w),
        channels=max(channels),
        bits=bits_of(next(iter(pixels.values()))),
    )


def read_labels(
    labels: Sequence[Array], names: tuple[str, ...] | None, where: str, task: type[Task] | None
) -> tuple[Task, Sequence[Targets]]:
    """The task of label arrays, inferred unless it is given, and the targets of each."""
    kind = task or task_type(infer_from_arrays(labels))
    if kind.single:
        classes, numbers = class_numbers(labels, names, where)
        return Multiclass(classes), numbers
    read, targets = kind.from_array(labels, names, where)
    if task is None:
        log.info("task: %s, inferred from the labels; override it with --task %s.", read, other_tasks(kind))
    return read, targets


def _pixels(images: Sequence[Array], where: str) -> list[Pixels]:
    """Images N H W (C) of any numeric type as uint8 N H W C, scaled by the range of the first array, train.

    16-bit images are left unscaled.
    """
    kind = images[0].dtype
    if kind.kind not in "buif" or any(x.dtype != kind for x in images):
        kinds = ", ".join(str(x.dtype) for x in images)
        raise UserError(f"{where}: all images must have one numeric type, preferably uint8, but they are {kinds}.")
    if kind.kind == "u" and kind.itemsize == 2 and images[0].size and images[0].max() > 255:
        images = [x.astype(np.uint16, copy=False) for x in images]  # to native byte order
    elif kind != np.uint8 and images[0].size:
        for x in images:
            if not np.isfinite(x).all() or (x < 0).any():
                raise UserError(f"{where}: pixel values must be finite and 0 or more, but some are negative or NaN.")
        top = float(images[0].max())
        if kind.kind in "bf" and top <= 1:
            scale = 255.0
        elif 127 < top <= 255 or top == 0:
            scale = 1.0
        elif kind.kind == "f" and top > 255:  # whose white nobody knows when single images are predicted later
            raise UserError(
                f"{where}: floats must be from 0 to 1 or from 0 to 255, but the largest is {top:g}. Divide them by "
                "their white point, or store 16-bit integers."
            )
        else:
            scale = 255 / top
            log.info("%s: pixel values are scaled from 0..%g to 0..255.", where, top)
        images = [np.clip(np.rint(x * scale), 0, 255).astype(np.uint8) for x in images]
    return [x if x.ndim == 4 else x[..., None] for x in images]


def class_numbers(
    labels: Sequence[Array], names: tuple[str, ...] | None, where: str
) -> tuple[tuple[str, ...], list[Numbers]]:
    """The class names, and the labels of every split as class indices."""
    for y in labels:
        if y.ndim != 1:
            raise UserError(
                f"{where}: class labels must have the shape (N,), but they have {y.shape}. Labels (N, K) must be 0 or "
                "1 for each of K labels, or numbers with --task regression."
            )
    ends = np.cumsum([len(y) for y in labels])[:-1]
    if all(y.dtype.kind in "iu" for y in labels):
        every = np.concatenate([y.astype(np.int64) for y in labels])
        if (every < 0).any():
            raise UserError(f"{where}: labels must be 0 or more, but one is {every.min()}.")
        if names is not None:
            if len(every) and every.max() >= len(names):
                raise UserError(f"{where}: a label is {every.max()}, but there are only {len(names)} class names.")
            return names, np.split(every, ends)
    else:
        every = np.concatenate([_text(y, f"{where}: labels must be integers from 0 or text") for y in labels])
        if names is not None:
            known = {name: number for number, name in enumerate(names)}
            unknown = sorted(set(every.tolist()) - set(known))
            if unknown:
                raise UserError(f"{where}: the label '{unknown[0]}' is not one of the names in classes.")
            return names, np.split(np.array([known[y] for y in every.tolist()], dtype=np.int64), ends)
    found, numbers = np.unique(every, return_inverse=True)
    return tuple(str(label) for label in found.tolist()), np.split(numbers.astype(np.int64), ends)


def _text(values: Array, rule: str) -> Array:
    if values.dtype.kind == "S":
        return np.char.decode(values, "utf-8", "replace")
    if values.dtype.kind != "U":
        raise UserError(f"{rule}, but they are {values.dtype}.")
    try:
        values.tolist()
    except (SystemError, ValueError) as error:  # a number that is no character
        raise UserError(f"{rule}, but they are damaged.") from error
    return values
