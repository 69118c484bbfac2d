"""Where images and their classes come from: folders, tables, `.npz` files and built-in sets, opened as one `Data`.

Every source is brought into one form (`Found`): class names, and for each split its items and targets.
What is common to all happens once, here: the checks, the order of the classes, the split that is held out for
validation.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vitrail.data.arrays import open_npz
from vitrail.data.builtin import BUILT_IN
from vitrail.data.dataset import Array, Data, Found, Numbers, Split, Targets, Task
from vitrail.data.folder import open_folder
from vitrail.data.table import SUFFIXES, open_table
from vitrail.data.targets import WORDS, check_trainable, reorder, strata
from vitrail.errors import UserError, nearest
from vitrail.progress import log


def open_data(
    source: str | Path,
    *,
    val_fraction: float = 0.2,
    seed: int = 0,
    data_dir: str | None = None,
    image_column: str | None = None,
    label_column: str | Sequence[str] | None = None,
    task: Task | None = None,
    classes: Sequence[str] | None = None,
) -> Data:
    """Opens a folder, a table, an `.npz` file or a built-in data set, and proves that every image can be read.

    Where the data has no validation split, `val_fraction` of every class is held out, by `seed`. The columns are
    those of a table. The `task` is seen from the data unless it is given. `classes` are those of a trained model, in
    its order: the data may then lack some of them, and a train split; nothing is held out then, and data without
    splits is one, "all".
    """
    if not 0 < val_fraction < 1:
        raise UserError(f"'val_fraction' must lie between 0 and 1, but it is {val_fraction}.")
    if seed < 0:
        raise UserError(f"'seed' must be 0 or more, but it is {seed}.")
    try:
        found = _find(source, data_dir, image_column, label_column, task, classes)
    except OSError as error:
        raise UserError(f"{error.filename or source} cannot be read: {error.strerror or error}.") from error
    if task is not None and found.task != task:
        raise UserError(f"The data {source} is {WORDS[found.task].title}, so the task cannot be {WORDS[task].title}.")
    parts = found.parts
    for split, (items, _) in parts.items():
        if not len(items):
            raise UserError(f"The {split} split of {source} has no images. Every split needs some.")
    if classes is None:
        check_trainable(found, source)
    else:
        parts = {split: (parts[split][0], targets) for split, targets in reorder(found, classes, source).items()}
        if parts.keys() == {"train"}:  # nobody trains on it, so nothing is held out
            parts = {"all": parts["train"]}
    return Data(
        name=found.name,
        classes=found.classes if classes is None else tuple(classes),
        splits=_splits(parts, found, val_fraction, seed, source),
        size=found.size,
        channels=found.channels,
        unreadable=found.unreadable,
        task=found.task,
    )


def full_name(source: str | Path) -> str:
    """The name under which a source is found from any folder: a built-in name, or an absolute path."""
    return source if isinstance(source, str) and source in BUILT_IN else str(Path(source).expanduser().resolve())


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


def hold_out(task: Task, targets: Targets, fraction: float, seed: int) -> tuple[Numbers, Numbers]:
    """`stratify` for every task; of a label that would be held out altogether, one image is kept."""
    keep, held = stratify(strata(task, targets, fraction), fraction, seed)
    if task == "multilabel":
        lost = np.flatnonzero(targets[held].any(axis=0) & ~targets[keep].any(axis=0))
        back = np.array([held[targets[held, label] > 0][0] for label in lost], dtype=np.int64)
        keep, held = np.union1d(keep, back), np.setdiff1d(held, back)
    return keep, held


def _find(
    source: str | Path,
    data_dir: str | None,
    image_column: str | None,
    label_column: str | Sequence[str] | None,
    task: Task | None,
    classes: Sequence[str] | None,
) -> Found:
    path = Path(source).expanduser()
    if path.suffix.lower() in SUFFIXES and path.is_file():
        return open_table(path, image_column, label_column, task, classes)
    if image_column is not None or label_column is not None:
        raise UserError(f"Image and label columns are those of a table ({', '.join(SUFFIXES)}), but {source} is none.")
    if isinstance(source, str) and source in BUILT_IN:
        if path.exists():
            log.info("'%s' is the built-in data set: write ./%s for the folder of that name.", source, source)
        return BUILT_IN[source](data_dir)
    if path.is_dir():
        return open_folder(path)
    if path.suffix.lower() == ".npz" and path.is_file():
        return open_npz(path, task)
    kinds = (
        f"a folder of images, an .npz file, a table ({', '.join(SUFFIXES)}) or a built-in name ({', '.join(BUILT_IN)})"
    )
    if path.exists():
        raise UserError(f"{source} is no data that can be read. It must be {kinds}.")
    raise UserError(f"There is no data '{source}'.{nearest(str(source), BUILT_IN)} It must be {kinds}.")


def _splits(
    parts: dict[str, tuple[Array, Targets]],
    found: Found,
    val_fraction: float,
    seed: int,
    source: str | Path,
) -> dict[str, Split]:
    if parts.keys() == {"train"}:
        items, targets = parts["train"]
        keep, held = hold_out(found.task, targets, val_fraction, seed)
        if not len(held):
            few = "one image per class" if found.task == "multiclass" else "too few images"
            raise UserError(f"{source} has {few}, so none can be held out for validation. Add images or a val split.")
        parts = {"train": (items[keep], targets[keep]), "val": (items[held], targets[held])}
    splits = {split: found.make(split, items, targets) for split, (items, targets) in parts.items()}
    if "val" not in splits and "test" in splits:
        log.info("%s has no val split: its test split serves for validation.", source)
        splits["val"] = splits["test"]
    return {split: splits[split] for split in ("train", "val", "test", "all") if split in splits}
