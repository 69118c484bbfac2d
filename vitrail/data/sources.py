"""Where images and their classes come from: folders, `.npz` files and built-in sets, opened as one `Data`.

Every source is brought into one form (`_Found`): class names, and for each split its items and class numbers.
What is common to all happens once, in `open_data`: the checks, the order of the classes, the split that is
held out for validation.
"""

from __future__ import annotations

import gzip
import os
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from vitrail.data.images import EXTENSIONS, ImageFacts, Pixels, UnreadableImage, inspect_image, read_image
from vitrail.errors import UserError, nearest
from vitrail.progress import log, track

Numbers = npt.NDArray[np.int64]
Array = npt.NDArray[Any]

_MOST_UNREADABLE = 0.01


class Split(Protocol):
    """One split of a data set: images with their targets, by number."""

    @property
    def targets(self) -> Numbers:
        """The class number of every image, (N,) int64."""

    def __len__(self) -> int: ...

    def image(self, i: int) -> Pixels:
        """Image `i` as stored, (H, W, C) uint8."""

    def name(self, i: int) -> str:
        """What image `i` is called: its path, or "digits/train/17"."""


@dataclass(frozen=True, eq=False)
class FileSplit:
    """Images in files, read when asked for."""

    paths: Sequence[Path]
    targets: Numbers
    channels: int

    def __len__(self) -> int:
        return len(self.paths)

    def image(self, i: int) -> Pixels:
        return read_image(self.paths[i], self.channels)

    def name(self, i: int) -> str:
        return str(self.paths[i])


@dataclass(frozen=True, eq=False)
class ArraySplit:
    """Images of one size in memory: (N, H, W, C) uint8."""

    pixels: Pixels
    targets: Numbers
    title: str

    def __len__(self) -> int:
        return len(self.pixels)

    def image(self, i: int) -> Pixels:
        image: Pixels = self.pixels[i]
        return image

    def name(self, i: int) -> str:
        return f"{self.title}/{i}"


@dataclass(frozen=True)
class Data:
    """A data set, opened and checked."""

    name: str  # short, for run folders
    classes: tuple[str, ...]
    splits: Mapping[str, Split]  # "train", "val", and "test" where there is one
    size: tuple[int, int]  # typical height and width: the array's own, or the medians over the files
    channels: int  # 1 if every image is grey, else 3
    unreadable: tuple[tuple[str, str], ...]  # file, reason: left out


@dataclass(frozen=True)
class _Found:
    """What a source holds, before a validation split is held out."""

    name: str
    classes: tuple[str, ...]
    parts: dict[str, tuple[Array, Numbers]]  # split: paths or pixels, class numbers
    make: Callable[[str, Array, Numbers], Split]
    size: tuple[int, int]
    channels: int
    unreadable: tuple[tuple[str, str], ...] = ()


def open_data(
    source: str | Path,
    *,
    val_fraction: float = 0.2,
    seed: int = 0,
    data_dir: str | None = None,
    classes: Sequence[str] | None = None,
) -> Data:
    """Opens a folder, an `.npz` file or a built-in data set, and proves that every image can be read.

    Where the data has no validation split, `val_fraction` of every class is held out, by `seed`. `classes`
    are those of a trained model, in its order: the data may then lack some of them, and a train split.
    """
    if not 0 < val_fraction < 1:
        raise UserError(f"'val_fraction' must lie between 0 and 1, but it is {val_fraction}.")
    if seed < 0:
        raise UserError(f"'seed' must be 0 or more, but it is {seed}.")
    try:
        found = _find(source, data_dir)
    except OSError as error:
        raise UserError(f"{error.filename or source} cannot be read: {error.strerror or error}.") from error
    parts = found.parts
    for split, (items, _) in parts.items():
        if not len(items):
            raise UserError(f"The {split} split of {source} has no images. Every split needs some.")
    if classes is None:
        _check_trainable(found, source)
    else:
        parts = _reorder(found, classes, source)
    return Data(
        name=found.name,
        classes=found.classes if classes is None else tuple(classes),
        splits=_splits(parts, found.make, val_fraction, seed, source),
        size=found.size,
        channels=found.channels,
        unreadable=found.unreadable,
    )


def stratify(targets: Numbers, fraction: float, seed: int) -> tuple[Numbers, Numbers]:
    """The numbers of the images to keep and of those to hold out, `fraction` of every class; both ascending.

    A class of two images or more is on both sides; a single image is kept.
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    order = np.argsort(targets, kind="stable")
    _, starts = np.unique(targets[order], return_index=True)
    held = np.zeros(len(targets), dtype=bool)
    for members in np.split(order, starts[1:]):
        count = min(max(round(len(members) * fraction), 1), len(members) - 1)
        held[rng.permutation(members)[:count]] = True
    return np.flatnonzero(~held), np.flatnonzero(held)


def _find(source: str | Path, data_dir: str | None) -> _Found:
    path = Path(source).expanduser()
    if isinstance(source, str) and source in _BUILT_IN:
        if path.exists():
            log.info("'%s' is the built-in data set: write ./%s for the folder of that name.", source, source)
        return _BUILT_IN[source](data_dir)
    if path.is_dir():
        return _folder(path)
    if path.suffix.lower() == ".npz" and path.is_file():
        return _npz(path)
    kinds = f"a folder of images, an .npz file or a built-in name ({', '.join(_BUILT_IN)})"
    if path.exists():
        raise UserError(f"{source} is neither a folder nor an .npz file: the data must be {kinds}.")
    raise UserError(f"There is no data '{source}'.{nearest(str(source), _BUILT_IN)} It must be {kinds}.")


def _check_trainable(found: _Found, source: str | Path) -> None:
    if "train" not in found.parts:
        raise UserError(f"{source} has no train split, only {' and '.join(found.parts)}.")
    trained = np.unique(found.parts["train"][1])
    if len(trained) < 2:
        raise UserError(f"{source} has one class only, '{found.classes[trained[0]]}': a classifier needs two or more.")
    for split, (_, targets) in found.parts.items():
        strange = np.setdiff1d(targets, trained)
        if len(strange):
            raise UserError(
                f"The class '{found.classes[strange[0]]}' is in the {split} split of {source}, but train has "
                "no image of it. Add some to train, or remove the class."
            )


def _reorder(found: _Found, classes: Sequence[str], source: str | Path) -> dict[str, tuple[Array, Numbers]]:
    numbers = {name: number for number, name in enumerate(classes)}
    for name in found.classes:
        if name not in numbers:
            raise UserError(
                f"{source} has a class '{name}' that the model does not know.{nearest(name, classes)} "
                f"The model's {len(classes)} classes are {_some(classes, 10)}."
            )
    order = np.array([numbers[name] for name in found.classes], dtype=np.int64)
    return {split: (items, order[targets]) for split, (items, targets) in found.parts.items()}


def _splits(
    parts: dict[str, tuple[Array, Numbers]],
    make: Callable[[str, Array, Numbers], Split],
    val_fraction: float,
    seed: int,
    source: str | Path,
) -> dict[str, Split]:
    if parts.keys() == {"train"}:
        items, targets = parts["train"]
        keep, held = stratify(targets, val_fraction, seed)
        if not len(held):
            raise UserError(
                f"{source} has one image per class, so none can be held out for validation. Add images or a val split."
            )
        parts = {"train": (items[keep], targets[keep]), "val": (items[held], targets[held])}
    splits = {split: make(split, items, targets) for split, (items, targets) in parts.items()}
    if "val" not in splits:
        log.info("%s has no val split: its test split serves for validation.", source)
        splits["val"] = splits["test"]
    return {split: splits[split] for split in ("train", "val", "test") if split in splits}


# Folders

_SPELLINGS = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
    "testing": "test",
}


def _folder(root: Path) -> _Found:
    files = {split: _class_files(folder) for split, folder in _split_folders(root).items()}
    classes = tuple(sorted({name for by_class in files.values() for name in by_class}))
    every = [path for by_class in files.values() for paths in by_class.values() for path in paths]
    facts, unreadable = _inspect(every)
    for name, paths in files.get("train", {}).items():
        if not any(path in facts for path in paths):
            raise UserError(f"No image of the class '{name}' in {root} can be read. Repair them, or remove the class.")
    parts: dict[str, tuple[Array, Numbers]] = {}
    for split, by_class in files.items():
        kept = [[path for path in by_class.get(name, ()) if path in facts] for name in classes]
        targets = np.repeat(np.arange(len(classes), dtype=np.int64), [len(paths) for paths in kept])
        parts[split] = np.array([path for paths in kept for path in paths], dtype=object), targets
    h, w = (int(np.median(sides)) for sides in zip(*((fact.h, fact.w) for fact in facts.values()), strict=True))
    channels = 1 if all(fact.grey for fact in facts.values()) else 3
    return _Found(
        name=root.resolve().name,
        classes=classes,
        parts=parts,
        make=lambda _, paths, targets: FileSplit(tuple(paths), targets, channels),
        size=(h, w),
        channels=channels,
        unreadable=tuple((str(path), reason) for path, reason in unreadable),
    )


def _split_folders(root: Path) -> dict[str, Path]:
    """The folder of every split, or the whole folder as the train split."""
    folders = _folders(root)
    found: dict[str, Path] = {}
    for folder in folders:
        split = _SPELLINGS.get(folder.name.lower())
        if split in found:
            raise UserError(f"{root} has two {split} splits, {found[split].name} and {folder.name}. Remove one.")
        if split:
            found[split] = folder
    # Where other folders lie beside it, a "train" without folders in it is a class: pictures of trains.
    if found and (len(found) == len(folders) or ("train" in found and _folders(found["train"]))):
        return found
    return {"train": root}


def _class_files(folder: Path) -> dict[str, list[Path]]:
    """The image files of every class: all those below the folder that bears its name."""
    loose = sum(_is_image(child.name) for child in folder.iterdir() if child.is_file())
    classes = _folders(folder)
    if not classes:
        if loose:
            raise UserError(
                f"{folder} holds images but no class folders: every class needs a folder of its own, as in "
                f"{folder / 'cat' / '1.jpg'} and {folder / 'dog' / '2.jpg'}."
            )
        raise UserError(f"{folder} has no images. It must hold one folder of images for every class.")
    if loose:
        log.warning("%d images in %s lie beside the class folders and are left out.", loose, folder)
    files = {child.name: _images_below(child) for child in classes}
    for name, paths in files.items():
        if not paths:
            raise UserError(
                f"The class folder {folder / name} has no images ({', '.join(sorted(EXTENSIONS))}). "
                "Put some into it, or remove it."
            )
    return files


def _folders(folder: Path) -> list[Path]:
    return sorted(
        (child for child in folder.iterdir() if child.is_dir() and not child.name.startswith(".")),
        key=lambda child: child.name,
    )


def _is_image(name: str) -> bool:
    return not name.startswith(".") and Path(name).suffix.lower() in EXTENSIONS


def _images_below(folder: Path) -> list[Path]:
    def stop(error: OSError) -> NoReturn:
        raise error

    found: list[Path] = []
    seen: set[Path] = set()
    for here, folders, names in os.walk(folder, followlinks=True, onerror=stop):
        real = Path(here).resolve()
        if real in seen:  # a link to where we have been
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(here, name) for name in names if _is_image(name)]
    return sorted(found, key=Path.as_posix)


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
            f"may be so: {_some(reasons, 3)}. Remove or repair them."
        )
    if unreadable:
        log.warning("%d of %d images cannot be read and are left out: %s.", count, len(files), _some(reasons, 10))
    return facts, unreadable


def _look(path: Path) -> ImageFacts | str:
    try:
        return inspect_image(path)
    except UnreadableImage as error:
        return str(error)


def _some(names: Sequence[str], most: int) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


# Arrays


def _npz(path: Path) -> _Found:
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
    return _arrays(path.stem, parts, names, str(path))


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


def _arrays(name: str, parts: Mapping[str, tuple[Array, Array]], names: tuple[str, ...] | None, where: str) -> _Found:
    """Checks images and labels of any accepted kind and makes them uint8 N H W C and class numbers."""
    for split, (x, y) in parts.items():
        if x.ndim not in (3, 4) or (x.ndim == 4 and x.shape[3] not in (1, 3)) or 0 in x.shape[1:]:
            raise UserError(
                f"{where}: the {split} images must have the shape (N, height, width), or (N, height, width, "
                f"channels) with 1 or 3 channels, but it is {x.shape}."
            )
        if y.ndim != 1 or len(y) != len(x):
            raise UserError(
                f"{where}: the {split} split must have one label for every image, but it has labels of shape "
                f"{y.shape} for {len(x)} images."
            )
    pixels = dict(zip(parts, _bytes([x for x, _ in parts.values()], where), strict=True))
    classes, numbers = _numbers([y for _, y in parts.values()], names, where)
    h, w = next(iter(pixels.values())).shape[1:3]
    return _Found(
        name=name,
        classes=classes,
        parts={split: (pixels[split], y) for split, y in zip(parts, numbers, strict=True)},
        make=lambda split, x, y: ArraySplit(x, y, f"{name}/{split}"),
        size=(h, w),
        channels=max(x.shape[3] for x in pixels.values()),
    )


def _bytes(images: Sequence[Array], where: str) -> list[Pixels]:
    """Images N H W (C) of any number type as uint8 N H W C; the first array, train, tells how to scale."""
    kind = images[0].dtype
    if kind.kind not in "buif" or any(x.dtype != kind for x in images):
        kinds = ", ".join(str(x.dtype) for x in images)
        raise UserError(f"{where}: all images must be numbers of one type, best uint8, but they are {kinds}.")
    if kind != np.uint8 and images[0].size:
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


# Built-in sets


def _digits(_data_dir: str | None) -> _Found:
    """scikit-learn's 1,797 handwritten digits, 8 × 8, with values 0 to 16."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    pixels = np.rint(images.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    return _arrays("digits", {"train": (pixels, labels)}, None, "digits")


_FASHION_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
_FASHION_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
_DEBIAN_FASHION = Path("/usr/share/datasets/fashion-mnist")  # of its package dataset-fashion-mnist


def _fashion_mnist(data_dir: str | None) -> _Found:
    """Zalando's 70,000 grey images of clothes, 28 × 28, from the four files of their release."""
    given = [Path(folder).expanduser() for folder in (data_dir, os.environ.get("VITRAIL_DATA")) if folder]
    places = [place for folder in given for place in (folder, folder / "fashion-mnist")]
    places.append(_DEBIAN_FASHION)
    for place in places:
        files = [_first_file(place / f"{name}.gz", place / name) for name in _FASHION_FILES]
        if None not in files:
            x, y, x_test, y_test = (_read_idx(file) for file in files if file)
            return _arrays("fashion-mnist", {"train": (x, y), "test": (x_test, y_test)}, _FASHION_CLASSES, str(place))
    raise UserError(
        f"fashion-mnist needs the four files {', '.join(_FASHION_FILES)} (or with .gz), which are not in "
        f"{', '.join(str(place) for place in places)}. `apt install dataset-fashion-mnist` brings them, or "
        "give their folder as data_dir or $VITRAIL_DATA."
    )


def _first_file(*paths: Path) -> Path | None:
    return next((path for path in paths if path.is_file()), None)


def _read_idx(path: Path) -> Pixels:
    """An array of bytes in MNIST's idx format: two zeros, the type, the number of dimensions, each length."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        if raw[:3] != b"\0\0\x08":
            raise ValueError("it does not begin as one")
        dimensions = raw[3]
        shape = np.frombuffer(raw, ">u4", dimensions, offset=4)
        return np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions).reshape(shape).copy()  # writable
    except (gzip.BadGzipFile, zlib.error, EOFError, IndexError, ValueError) as error:
        raise UserError(f"{path} is not a whole idx file: {error}. Fetch it again.") from error


_BUILT_IN: dict[str, Callable[[str | None], _Found]] = {"digits": _digits, "fashion-mnist": _fashion_mnist}
