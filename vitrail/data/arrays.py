"""Images and labels in arrays, from an `.npz` file or from memory."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from vitrail.data.dataset import Array, ArraySplit, Found, Numbers
from vitrail.data.pixels import Pixels, bits_of
from vitrail.errors import UserError
from vitrail.progress import log


def open_npz(path: Path) -> Found:
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
        names = tuple(_text(arrays["classes"].ravel(), f"{path}: classes must be text").tolist())
        if len(set(names)) < len(names):
            raise UserError(f"{path}: the names in classes must differ from each other.")
    return from_arrays(path.stem, parts, names, str(path))


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


def from_arrays(
    name: str, parts: Mapping[str, tuple[Array, Array]], names: tuple[str, ...] | None, where: str
) -> Found:
    """Checks images and labels of any accepted kind and makes them uint8 or uint16 N H W C and class numbers."""
    for split, (x, y) in parts.items():
        first = x.ndim == 4 and x.shape[1] < min(x.shape[2:])  # channels first, as in torch
        if x.ndim not in (3, 4) or first or 0 in x.shape[1:]:
            raise UserError(
                f"{where}: the {split} images must have the shape (N, height, width), or (N, height, width, "
                f"channels), but it is {x.shape}."
            )
        if y.ndim != 1 or len(y) != len(x):
            raise UserError(
                f"{where}: the {split} split must have one label for every image, but it has labels of shape "
                f"{y.shape} for {len(x)} images."
            )
    pixels = dict(zip(parts, _pixels([x for x, _ in parts.values()], where), strict=True))
    channels = {x.shape[3] for x in pixels.values()}
    if len(channels) > 1 and not channels <= {1, 3}:
        raise UserError(f"{where}: the images of all splits must have the same channels, but they have {channels}.")
    classes, numbers = _numbers([y for _, y in parts.values()], names, where)
    h, w = next(iter(pixels.values())).shape[1:3]
    return Found(
        name=name,
        classes=classes,
        parts={split: (pixels[split], y) for split, y in zip(parts, numbers, strict=True)},
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


def _numbers(
    labels: Sequence[Array], names: tuple[str, ...] | None, where: str
) -> tuple[tuple[str, ...], list[Numbers]]:
    """The class names, and the labels of every split as numbers of these."""
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
