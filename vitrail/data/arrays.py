"""Images and labels in arrays, from an `.npz` file, from pairs of `.npy` files or from memory."""

from __future__ import annotations

import re
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from vitrail.data.dataset import Array, ArraySplit, Found, MappedSplit, Numbers, Parts, Targets
from vitrail.data.folder import SPLITS
from vitrail.data.pixels import Pixels, bits_of
from vitrail.errors import UserError
from vitrail.progress import log
from vitrail.tasks import TASKS, Multiclass, Task, task_type
from vitrail.tasks.infer import infer_from_arrays


def open_npz(path: Path, task: type[Task] | None = None) -> Found:
    arrays = _read_npz(path)
    parts = {}
    for split in ("train", "val", "test"):
        x, y = f"x_{split}", f"y_{split}"
        if x in arrays and y in arrays:
            parts[split] = arrays[x], arrays[y]
        elif x in arrays or y in arrays:
            raise UserError(f"{path} must hold both {x} and {y}, but it holds one of them only.")
    for x, y in (("images", "labels"), ("x", "y")):
        if not parts and x in arrays and y in arrays:
            parts["train"] = arrays[x], arrays[y]
    if not parts:
        raise UserError(
            f"{path} must hold the arrays x_train and y_train (and _val, _test), or images and labels, or X "
            f"and y, but it holds {', '.join(arrays) or 'none'}."
        )
    names = None
    if "classes" in arrays:
        names = _class_names(arrays["classes"], path)
    return from_arrays(path.stem, parts, names, str(path), task)


def _read_npz(path: Path) -> dict[str, Array]:
    """Every array of the file by its name in lower case."""
    try:
        with path.open("rb") as stream:
            file = np.load(stream, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise UserError(f"{path} holds a single array, not an .npz archive: save it with np.savez.")
            return {name.lower(): file[name] for name in file.files}
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError) as error:
        if "allow_pickle" in str(error):
            raise UserError(
                f"{path} holds an array of Python objects, which is never loaded because it could run code. "
                "Save images as one uint8 array and names as text (dtype str)."
            ) from error
        raise UserError(f"{path} is not a readable .npz file: {error}.") from error


# The word in the name of a file of images, and the one in its place in the name of their labels.
_PAIRS = (("images", "labels"), ("image", "label"), ("x", "y"))


def open_npy(path: Path, task: type[Task] | None = None) -> Found:
    """One file of images with its labels; a part of them is held out, whatever lies beside."""
    labels = _labels_of(path)
    if labels is None or not labels.exists():
        rule = "its name with 'x' turned into 'y' or 'images' into 'labels', as x_train.npy and y_train.npy"
        wanted = f"There is no {labels}." if labels else "It has neither word in its name: rename it."
        raise UserError(f"The labels of {path} must lie beside it, in {rule}. {wanted}")
    others = [other.name for other in npy_images(path.parent) if other.name != path.name]
    if others:
        log.info("%s is beside %s: give the folder, and its splits are used.", path.name, ", ".join(others))
    return _from_npy(path.stem, {"train": (path, labels)}, path, task)


def open_npy_folder(folder: Path, task: type[Task] | None = None) -> Found:
    """A folder of such pairs, one for every split that their names tell: x_train and y_train, x_val and y_val, …."""
    pairs: dict[str, tuple[Path, Path]] = {}
    for path in npy_images(folder):
        split = next((SPLITS[word] for word in _words(path) if word in SPLITS), "train")
        if split in pairs:
            raise UserError(f"{folder} has two files of {split} images, {pairs[split][0].name} and {path.name}.")
        labels = _labels_of(path)
        assert labels is not None  # or it would not be one of images
        if not labels.exists():
            raise UserError(f"{path} has no labels: they must lie in {labels.name} beside it.")
        pairs[split] = path, labels
    return _from_npy(folder.resolve().name, pairs, folder, task)


def npy_images(folder: Path) -> list[Path]:
    """The `.npy` files in a folder that are called as arrays of images are."""
    return sorted(path for path in folder.glob("*.npy") if _labels_of(path) is not None)


def _words(path: Path) -> list[str]:
    return re.split(r"[-_. ]", path.stem.lower())


def _labels_of(path: Path) -> Path | None:
    """Where the labels of an array of images lie, in any case of the letters; None if its name tells of none."""
    for x, y in _PAIRS:
        if x in _words(path):
            name = re.sub(rf"(?i)(?<![^-_. ]){x}(?![^-_. ])", y, path.name, count=1)
            beside = (other for other in path.parent.glob("*.npy") if other.name.lower() == name.lower())
            return next(beside, path.with_name(name))
    return None


def _from_npy(name: str, pairs: Mapping[str, tuple[Path, Path]], where: Path, task: type[Task] | None) -> Found:
    parts = {split: (_read_npy(x), _read_npy(y)) for split, (x, y) in pairs.items()}
    names_file = where / "classes.npy" if where.is_dir() else where.with_name("classes.npy")
    names = _class_names(_read_npy(names_file), names_file) if names_file.exists() else None
    return from_arrays(name, parts, names, str(where), task)


def _read_npy(path: Path) -> Array:
    """The array of a file, mapped into memory: what is not asked for is not read."""
    try:
        array: Array = np.lib.format.open_memmap(path, mode="r")  # type: ignore[no-untyped-call]
    except ValueError as error:
        if "Python objects" in str(error):
            raise UserError(
                f"{path} holds Python objects, which are never loaded because they could run code. "
                "Save images as one uint8 array and names as text (dtype str)."
            ) from error
        raise UserError(f"{path} is not a whole .npy file: {error}.") from error
    return array


def _class_names(array: Array, where: Path) -> tuple[str, ...]:
    names = tuple(_text(array.ravel(), f"{where}: classes must be text").tolist())
    if len(set(names)) < len(names):
        raise UserError(f"{where}: the names in classes must differ from each other.")
    return names


def from_arrays(
    name: str,
    parts: Mapping[str, tuple[Array, Array]],
    names: tuple[str, ...] | None,
    where: str,
    task: type[Task] | None = None,
) -> Found:
    """Checks images and labels of any accepted kind and makes them uint8 or uint16 N H W C and targets.

    Labels (N, K) of 0 and 1 are multi-label, other numbers with fractions a regression, unless the task is given.
    """
    for split, (x, y) in parts.items():
        first = x.ndim == 4 and x.shape[1] < min(x.shape[2:])  # channels first, as in torch
        if x.ndim not in (3, 4) or first or 0 in x.shape[1:]:
            raise UserError(
                f"{where}: the {split} images must have the shape (N, height, width), or (N, height, width, "
                f"channels), but it is {x.shape}."
            )
        if len(y) != len(x):
            raise UserError(
                f"{where}: the {split} split must have one label for every image, but it has labels of shape "
                f"{y.shape} for {len(x)} images."
            )
    labels = [y for _, y in parts.values()]
    kind = task or task_type(infer_from_arrays(labels))
    pixels = dict(zip(parts, _pixels([x for x, _ in parts.values()], where), strict=True))
    channels = {x.shape[3] for x in pixels.values()}
    if len(channels) > 1 and not channels <= {1, 3}:
        raise UserError(f"{where}: the images of all splits must have the same channels, but they have {channels}.")
    read: Task
    if kind.single:
        classes, targets = class_numbers(labels, names, where)
        read = Multiclass(classes)
    else:
        read, targets = kind.from_array(labels, names, where)
        if task is None:
            others = " or ".join(other for other in TASKS if other != read.name)
            log.info("task: %s, inferred from the labels; to change it, give --task %s.", read, others)
    h, w = next(iter(pixels.values())).shape[1:3]
    if any(isinstance(x, np.memmap) for x in pixels.values()):  # rows are chosen, not copied
        mapped = Parts([((x, f"{name}/{split}"), len(x)) for split, x in pixels.items()])

        def make(_: str, rows: Numbers, y: Targets) -> MappedSplit:
            (x, title), rows = mapped.find(rows)
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


def _pixels(images: Sequence[Array], where: str) -> list[Pixels]:
    """Images N H W (C) of any number type as uint8 N H W C; the first array, train, tells how to scale.

    16-bit images stay as they are.
    """
    kind = images[0].dtype
    if kind.kind not in "buif" or any(x.dtype != kind for x in images):
        kinds = ", ".join(str(x.dtype) for x in images)
        raise UserError(f"{where}: all images must be numbers of one type, best uint8, but they are {kinds}.")
    if kind.kind == "u" and kind.itemsize == 2 and images[0].size and images[0].max() > 255:
        images = [x.astype(np.uint16, copy=False) for x in images]  # in this machine's order of bytes
    elif kind != np.uint8 and images[0].size:
        for x in images:
            if not np.isfinite(x).all() or (x < 0).any():
                raise UserError(f"{where}: pixel values must be 0 or more, but some are negative or not a number.")
        top = float(images[0].max())
        if kind.kind in "bf" and top <= 1:
            scale = 255.0
        elif 127 < top <= 255 or top == 0:
            scale = 1.0
        else:
            scale = 255 / top
            log.info("%s: pixel values 0 to %g are scaled to 0 to 255.", where, top)
        images = [np.clip(np.rint(x * scale), 0, 255).astype(np.uint8) for x in images]
    return [x if x.ndim == 4 else x[..., None] for x in images]


def class_numbers(
    labels: Sequence[Array], names: tuple[str, ...] | None, where: str
) -> tuple[tuple[str, ...], list[Numbers]]:
    """The class names, and the labels of every split as numbers of these."""
    for y in labels:
        if y.ndim != 1:
            raise UserError(
                f"{where}: a class is one label for every image, (N,), but the labels are {y.shape}. Labels (N, K) are "
                "0 and 1 for each of K labels, or numbers with --task regression."
            )
    ends = np.cumsum([len(y) for y in labels])[:-1]
    if all(y.dtype.kind in "iu" for y in labels):
        every = np.concatenate([y.astype(np.int64) for y in labels])
        if (every < 0).any():
            raise UserError(f"{where}: labels must be 0 or more, but one is {every.min()}.")
        if names is not None:
            if len(every) and every.max() >= len(names):
                raise UserError(f"{where}: a label is {every.max()}, but there are {len(names)} class names only.")
            return names, np.split(every, ends)
    else:
        every = np.concatenate([_text(y, f"{where}: labels must be whole numbers from 0 or text") for y in labels])
        if names is not None:
            known = {name: number for number, name in enumerate(names)}
            strange = sorted(set(every.tolist()) - set(known))
            if strange:
                raise UserError(f"{where}: the label '{strange[0]}' is not among the names in classes.")
            return names, np.split(np.array([known[y] for y in every.tolist()], dtype=np.int64), ends)
    found, numbers = np.unique(every, return_inverse=True)
    return tuple(str(label) for label in found.tolist()), np.split(numbers.astype(np.int64), ends)


def _text(values: Array, rule: str) -> Array:
    if values.dtype.kind == "S":
        return np.char.decode(values, "utf-8", "replace")
    if values.dtype.kind != "U":
        raise UserError(f"{rule}, but they are {values.dtype}.")
    return values
