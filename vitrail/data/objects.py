"""Data sets given as Python objects instead of names: arrays, tensors, lists, torch and Hugging Face data sets, frames.

| object                                        | read as                                                          |
|-----------------------------------------------|------------------------------------------------------------------|
| `(images, labels)`                            | arrays and tensors as an `.npz` file of them, lists image by image |
| list of `(image, label)`                      | files if all images are paths, else image by image               |
| map-style `torch.utils.data.Dataset`          | its items `(image, target)`, on access; one thread at a time     |
| `datasets.Dataset`, `datasets.DatasetDict`    | as from the hub                                                  |
| pandas or polars `DataFrame`                  | as a table; paths are relative to the current folder             |
| `Data`                                        | as it is                                                         |

An image is anything in `image_like`, a label anything in `labels`. Without labels, images alone are enough.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from vitrail.data.arrays import from_arrays, read_labels
from vitrail.data.dataset import Array, Data, Found, Numbers, Split, Subset, Targets, reads_labels
from vitrail.data.folder import channels_and_bits, from_paths, leave_out
from vitrail.data.huggingface import open_dataset
from vitrail.data.image_like import GivenImage, as_array, given_image, is_array, is_tensor, shown
from vitrail.data.images import ImageFacts, facts_of, inspect_image
from vitrail.data.labels import label_array
from vitrail.data.pixels import Pixels, fit
from vitrail.data.rows import GlobalRows
from vitrail.data.table import open_columns
from vitrail.data.verify import verify
from vitrail.errors import UserError
from vitrail.progress import log
from vitrail.tasks import Task

PREFIX = "python:"  # of the names of such data, in config.yaml and in messages

KINDS = (
    "(images, labels), a list of (image, label) pairs, a map-style torch Dataset, a Hugging Face Dataset, a pandas or "
    "polars DataFrame, or vitrail's Data"
)


def object_name(source: object) -> str:
    """The name of data given as an object, such as "python:arrays"."""
    if isinstance(source, Data):
        return PREFIX + source.name
    if _is_from("pandas", source) or _is_from("polars", source):
        return f"{PREFIX}table"
    if isinstance(source, tuple) and source and is_array(source[0]):
        return f"{PREFIX}arrays"
    if isinstance(source, Sequence) and not isinstance(source, str | bytes):
        return f"{PREFIX}images"
    return PREFIX + ("arrays" if is_array(source) else type(source).__name__.lower())


def open_object(
    source: Any,
    image_column: str | None,
    label_column: str | Sequence[str] | None,
    task: type[Task] | None,
    model: Task | None,
    verify: bool,
    image_dir: str | None = None,
) -> Found:
    """The content of data given as an object, as in `sources.open_source`."""
    where, labelled = object_name(source), reads_labels(task)
    name = where.removeprefix(PREFIX)
    if _is_from("datasets", source):
        return open_dataset(source, name, where, image_column, label_column, task)
    if _is_from("pandas", source) or _is_from("polars", source):
        folder = Path(image_dir or "").expanduser()
        return open_columns(_columns(source), name, where, folder, image_column, label_column, task, model, verify)
    if image_column is not None or label_column is not None:
        raise UserError(
            f"'image_column' and 'label_column' apply to tables and Hugging Face data sets, not to {where}."
        )
    if isinstance(source, Data):
        return _from_data(source)
    if _is_map_style(source):
        return _from_dataset(source, name, where, task if labelled else None, labelled)
    images, labels = _images_and_labels(source, where)
    if not labelled:
        labels, task = [""] * len(images), None
    elif labels is None:
        raise UserError(f"{where} has no labels. Give (images, labels), or pre-train without labels: vitrail.pretrain.")
    if len(images) == 0 or len(images) != len(labels):
        raise UserError(
            f"{where} must have one label per image, but it has {len(images)} images and {len(labels)} labels."
        )
    y, classes = label_array(labels, where)
    if is_array(images) and as_array(images).dtype.kind not in "OUS":  # not an array of paths
        return from_arrays(name, {"train": (_stack(images), y)}, classes, where, task)
    read, (targets,) = read_labels([y], classes, where, task)
    if all(isinstance(image, str | Path) for image in images):
        paths = np.array([Path(image).expanduser() for image in images], dtype=object)
        return from_paths(name, read, {"train": (paths, targets)}, verify)
    items = [given_image(image, i) for i, image in enumerate(images)]
    return _from_items(name, read, targets, items.__getitem__, len(items))


def _is_from(package: str, thing: object) -> bool:
    """Whether it is a data set or a frame of a package, which has then been imported."""
    module = sys.modules.get(package)
    kinds = "Dataset DatasetDict IterableDataset IterableDatasetDict" if package == "datasets" else "DataFrame"
    return module is not None and isinstance(thing, tuple(getattr(module, kind) for kind in kinds.split()))


def _is_map_style(source: object) -> bool:
    """Whether it has items by number, like a map-style data set of torch, and is not a plain list or array."""
    plain = isinstance(source, Sequence | Mapping) or is_array(source)
    return not plain and hasattr(source, "__getitem__") and hasattr(source, "__len__")


def _images_and_labels(source: Any, where: str) -> tuple[Any, Any]:
    """The images and labels of a pair, of a list of pairs, or images alone."""
    if isinstance(source, tuple) and len(source) == 2:
        return source
    if is_array(source):
        return source, None
    if isinstance(source, Sequence) and not isinstance(source, str | bytes):
        if len(source) == 2 and is_array(source[0]) and source[0].ndim > 2 and len(source[0]) == len(source[1]):
            raise UserError("Images and labels must be a tuple, (images, labels), but they are a list of the two.")
        return _unzipped(source, where)
    hint = " An iterable-style data set cannot be shuffled: list its items." if hasattr(source, "__iter__") else ""
    raise UserError(f"Data from Python must be {KINDS}, but it is {shown(source)}.{hint}")


def _columns(frame: Any) -> list[tuple[str, list[Any]]]:
    """The names and cells of a frame's columns; missing cells are None."""
    if _is_from("polars", frame):
        return list(frame.to_dict(as_series=False).items())
    plain = frame.astype(object).where(frame.notna(), None)
    return [(str(name), plain.iloc[:, k].tolist()) for k, name in enumerate(frame.columns)]


def _stack(images: Any) -> Array:
    """Images in one array, (N, H, W) or (N, H, W, C); (N, C, H, W) if the second dimension is the smallest."""
    if is_tensor(images) and images.ndim == 3:
        return np.asarray(images.detach().cpu())  # N H W, which has no channels to move
    x = as_array(images)
    first = not is_tensor(images) and x.ndim == 4 and x.shape[1] < min(x.shape[2:])
    return np.moveaxis(x, 1, 3) if first else x


def _unzipped(source: Sequence[Any], where: str) -> tuple[list[Any], list[Any] | None]:
    """The images and labels of a list of pairs, or a list of images alone."""
    pairs = [isinstance(item, tuple | list) for item in source]
    if not any(pairs):
        return list(source), None
    for i, item in enumerate(source):
        if not pairs[i] or len(item) != 2:
            raise UserError(f"{where}: every item must be an (image, label) pair, but item {i} is {shown(item)}.")
    return [image for image, _ in source], [label for _, label in source]


# Images of any size, read on access --------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ObjectSplit(Split):
    """Images given as Python objects, converted on access."""

    read: Callable[[int], GivenImage]
    rows: Numbers
    targets: Targets
    title: str
    channels: int
    bits: int
    white: float | None  # of floats that are pictures: the value that becomes 255; None for other images

    def __len__(self) -> int:
        return len(self.rows)

    def image(self, i: int) -> Pixels:
        image = self.read(int(self.rows[i]))
        if self.white is None or isinstance(image.content, str | Path | bytes):
            return image.pixels(self.channels, self.bits)
        stored = image.pixels()
        if stored.dtype == np.float32:
            stored = np.rint(stored * (255 / self.white)).clip(0, 255).astype(np.uint8)
            return fit(stored, self.channels, self.bits)
        return image.pixels(self.channels, self.bits)

    def name(self, i: int) -> str:
        return f"{self.title}/{self.rows[i]}"

    def version(self) -> str:
        """A hash of all pixels: transforms of a data set may be random."""
        digest = hashlib.blake2b(digest_size=16)
        for i in range(len(self)):
            image = self.image(i)
            digest.update(f"{image.dtype} {image.shape}".encode())
            digest.update(np.ascontiguousarray(image).data)
        return digest.hexdigest()

    def read_as(self, channels: int, bits: int) -> Split:
        return replace(self, channels=channels, bits=bits)


def _from_dataset(source: Any, name: str, where: str, task: type[Task] | None, labelled: bool) -> Found:
    """A map-style data set. All items are read once, for their targets and to verify their images."""
    lock = Lock()
    labels: dict[int, Any] = {}

    def item(i: int) -> GivenImage:
        with lock:  # data sets are written for worker processes, and need not be thread-safe
            found = source[i]
        if isinstance(found, tuple | list) and len(found) == 2:
            labels.setdefault(i, found[1])
            found = found[0]
        elif not labelled and isinstance(found, tuple | list) and len(found) == 1:  # as in a TensorDataset of images
            found = found[0]
        elif labelled or isinstance(found, tuple | list | Mapping):
            raise UserError(f"{where}: every item must be an (image, target) pair, but item {i} is {shown(found)}.")
        return given_image(found, i)

    def targets() -> tuple[Task, Targets]:
        if not labelled:
            labels.update(dict.fromkeys(range(len(source)), ""))
        y, classes = label_array([labels.get(i, next(iter(labels.values()))) for i in range(len(source))], where)
        named = getattr(source, "classes", None)  # as in torchvision
        if classes is None and y.ndim == 1 and y.dtype.kind in "iu" and isinstance(named, Sequence):
            classes = tuple(map(str, named)) if len(set(map(str, named))) == len(named) > y.max(initial=0) else None
        read, (found,) = read_labels([y], classes, where, task)
        return read, found

    return _from_items(name, None, targets, item, len(source))


def _from_items(
    name: str,
    task: Task | None,
    targets: Targets | Callable[[], tuple[Task, Targets]],
    item: Callable[[int], GivenImage],
    count: int,
) -> Found:
    """Images of any size, each verified once; `targets` may be a function that is called afterwards."""
    facts, lowest, highest = _verified(item, count)
    if callable(targets):
        task, targets = targets()
    assert task is not None
    kept = np.array([isinstance(fact, ImageFacts) for fact in facts], dtype=bool)
    leave_out([(f"{name}/{i}", str(facts[i])) for i in np.flatnonzero(~kept).tolist()], count)
    good = {f"{name}/{i}": fact for i, fact in enumerate(facts) if isinstance(fact, ImageFacts)}
    white = None
    if any(fact.bits == 32 for fact in good.values()):
        if lowest >= 0 and highest <= 255:
            white = 1.0 if highest <= 1 else 255.0
            good = {place: replace(fact, bits=8) if fact.bits == 32 else fact for place, fact in good.items()}
        else:
            log.info(
                "%s: images are floats from %g to %g, which are used as they are. If they are normalised pictures, "
                "remove the normalisation: the model then reads image files too.", name, lowest, highest,
            )  # fmt: skip
    channels, bits = channels_and_bits(good)
    return Found(
        name=name,
        task=task,
        parts={"train": (np.flatnonzero(kept), targets[kept])},
        make=lambda split, rows, y: ObjectSplit(item, rows, y, f"{name}/{split}", channels, bits, white),
        size=(int(np.median([fact.h for fact in good.values()])), int(np.median([fact.w for fact in good.values()]))),
        channels=channels,
        bits=bits,
        unreadable=tuple((f"{name}/{i}", str(facts[i])) for i in np.flatnonzero(~kept).tolist()),
    )


def _verified(item: Callable[[int], GivenImage], count: int) -> tuple[list[ImageFacts | str], float, float]:
    """The facts of every image, or why it cannot be read, and the range of floats."""
    lows, highs = [0.0], [0.0]

    def inspect(i: int) -> ImageFacts:
        image = item(i)
        if isinstance(image.content, str | Path | bytes):
            return inspect_image(image.content)
        pixels = image.pixels()
        if pixels.dtype == np.float32:
            lows.append(float(pixels.min()))
            highs.append(float(pixels.max()))
        return facts_of(pixels)

    facts = verify(range(count), inspect)
    return facts, min(lows), max(highs)


# vitrail's own ------------------------------------------------------------------------------------------------


def _from_data(data: Data) -> Found:
    """Opened data, with its splits; one split "all" counts as train."""
    splits = {"train" if name == "all" else name: split for name, split in data.splits.items()}
    known = GlobalRows([(split, len(split)) for split in splits.values()])

    def make(_: str, rows: Numbers, targets: Targets) -> Split:
        split, numbers = known.locate(rows)
        whole = len(numbers) == len(split) and np.array_equal(numbers, np.arange(len(split)))
        return split if whole and targets is split.targets else Subset(split, numbers, targets)

    parts: dict[str, tuple[Array, Targets]] = {
        name: (rows, split.targets) for (name, split), rows in zip(splits.items(), known.rows(), strict=True)
    }
    return Found(data.name, data.task, parts, make, data.size, data.channels, data.unreadable, data.bits)
