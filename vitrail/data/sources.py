"""`open_data`: a folder, table, array, Hugging Face data set, tar shards, built-in data set or object as one `Data`.

Every source is first converted to `Found`: class names, and for each split its items and targets. What all sources
share is done here: validation, class order, hold-out and folds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from vitrail.config import TokenizerName
from vitrail.data.arrays import npy_images, open_npy, open_npy_folder, open_npz
from vitrail.data.boxes import marked_images, open_boxes
from vitrail.data.builtin import BUILT_IN
from vitrail.data.captions import has_captions, is_coco_captions, open_captioned, open_coco
from vitrail.data.dataset import Array, Data, Found, Split, Targets, reads_labels
from vitrail.data.folder import open_folder
from vitrail.data.holdout import cut_folds, hold_out
from vitrail.data.huggingface import PREFIX, holds_images, is_saved, open_files, open_hub, open_saved
from vitrail.data.images import allow_pixels
from vitrail.data.masks import named_masks, open_masks
from vitrail.data.objects import PREFIX as PYTHON
from vitrail.data.objects import object_name, open_object
from vitrail.data.shards import is_shards, open_shards
from vitrail.data.shards.fetch import is_address
from vitrail.data.table import SUFFIXES, open_table
from vitrail.errors import UserError, nearest, shown
from vitrail.progress import log
from vitrail.tasks import Boxes, Masks, Task, task_type
from vitrail.tasks.captions import are_captions

Source: TypeAlias = Any  # a name, str or Path, or a Python object, see `objects`


def open_data(
    source: Source,
    *,
    val: Source | None = None,
    val_fraction: float = 0.2,
    folds: int = 0,
    fold: int = 0,
    seed: int = 0,
    data_dir: str | None = None,
    image_column: str | None = None,
    label_column: str | Sequence[str] | None = None,
    task: str | None = None,
    streaming: bool = False,
    model: Task | None = None,
    image_dir: str | None = None,
    max_pixels: int | None = None,
    tokenizer: TokenizerName | None = None,
    context: int | None = None,
    mask_values: Sequence[str] | None = None,
    cache_gb: float | None = None,
) -> Data:
    """Opens a data set and, unless it is streamed, verifies that every image can be read.

    `val` is other data to validate on. Without a validation split, a stratified `val_fraction` is held out, by `seed`.
    With `folds`, train and val are pooled, and fold number `fold` (from 1) is held out. `image_column` and
    `label_column` apply to tables and Hugging Face data sets. The `task` is inferred from the data unless given; a task
    that reads no labels needs none. With `model`, the task of a trained model, targets have its classes in its order:
    the data may then lack some of them, needs no train split, and nothing is held out; data without splits becomes one
    split, "all". `image_dir` is the folder of a table's images. `max_pixels` is the limit of `allow_pixels`.
    `tokenizer` and `context` apply to captions.
    `mask_values` gives the class of each value of masks, as in ("0=ground", "255=nucleus"). `cache_gb` bounds
    the cache of remote shards.
    """
    if max_pixels is not None:
        allow_pixels(max_pixels)
    if not 0 < val_fraction < 1:
        raise UserError(f"'val_fraction' must be above 0 and below 1, but it is {val_fraction:g}.")
    if folds and not (folds >= 2 and 1 <= fold <= folds):
        raise UserError(f"'folds' must be 2 or more and 'fold' from 1 to 'folds', but it is fold {fold} of {folds}.")
    if seed < 0:
        raise UserError(f"'seed' must be at least 0, but it is {seed}.")
    kind = task_type(task) if task is not None else None if model is None else type(model)
    where = full_name(source) if is_object(source) else source
    try:
        how: dict[str, Any] = {"image_dir": image_dir, "mask_values": mask_values, "cache_gb": cache_gb}
        found = open_source(source, data_dir, image_column, label_column, kind, streaming, model, **how)
        if val is not None:
            if folds:
                raise UserError("Cross-validation makes its own validation splits. Remove either val or folds.")
            columns = image_column, label_column, type(found.task)
            other = open_source(val, data_dir, *columns, streaming, found.task, **how)
            found = _with_val(found, other, full_name(val))
    except OSError as error:
        raise UserError(f"{error.filename or where} cannot be read: {error.strerror or error}.") from error
    found = with_captions(found, kind)
    if kind is not None and type(found.task) is not kind:
        if not (kind.single and found.task.single):
            raise UserError(f"{where} is {found.task.title} data, so the task cannot be {kind.title}.")
        found = replace(found, task=kind(found.classes))  # same targets, another meaning
    for name in found.classes:
        if name.encode(errors="ignore").decode() != name:  # cards and reports could not be written
            raise UserError(f"The {found.task.one} {shown(name)} of {where} is not valid UTF-8 text. Rename it.")
    parts = found.parts
    for split, (items, _) in parts.items():
        if not len(items):
            raise UserError(f"The {split} split of {where} has no images. Add some, or remove the split.")
    targets = {split: part[1] for split, part in parts.items()}
    if model is None:
        if "train" not in parts:
            raise UserError(f"{where} has no train split, only {' and '.join(parts)}.")
        found.task.check(targets, where)
        found = replace(found, task=found.task.tokenized(targets["train"], tokenizer, context))
    else:
        adopted = found.task.adopt(model, targets, where)
        parts = {split: (parts[split][0], adopted[split]) for split in parts}
        if parts.keys() == {"train"}:  # not for training: nothing is held out
            parts = {"all": parts["train"]}
    if folds:
        parts = _hold_out_fold(parts, found, folds, fold, seed, where)
    return Data(
        name=found.name,
        task=found.task if model is None else model,
        splits=_splits(parts, found, val_fraction, seed, where),
        size=found.size,
        channels=found.channels,
        unreadable=found.unreadable,
        bits=found.bits,
    )


def with_captions(found: Found, task: type[Task] | None) -> Found:
    """Labels that read like captions as captions; with the task of captions, class names as well."""
    kind = task_type("pairs")
    numbers = [targets for _, targets in found.parts.values()]
    if task is None and found.task.single:
        texts = [found.classes[k] for targets in numbers for k in targets.tolist()] if found.classes else []
        task = kind if are_captions(texts) else None
    if task is not kind or isinstance(found.task, kind) or not found.task.single:
        return found
    named, targets = kind.from_classes(found.classes, {split: part[1] for split, part in found.parts.items()})
    parts = {split: (items, targets[split]) for split, (items, _) in found.parts.items()}
    return replace(found, task=named, parts=parts)


def is_object(source: Source) -> bool:
    """Whether data is given as a Python object, not by name."""
    return not isinstance(source, str | PathLike)


def full_name(source: Source) -> str:
    """The name of a source that is valid in any folder: of a built-in or hub data set, a path, or "python:arrays"."""
    if is_object(source):
        return object_name(source)
    if isinstance(source, str) and (source in BUILT_IN or source.startswith((PREFIX, PYTHON))):
        return source
    if is_address(source):
        return str(source).rstrip("/")
    return str(Path(source).expanduser().resolve())


def is_there(source: str) -> bool:
    """Whether a source by its full name exists, as far as the disk can tell: hub and built-in names always do."""
    return source in BUILT_IN or source.startswith(PREFIX) or is_shards(source) or Path(source).exists()


def _with_val(found: Found, val: Found, where: str) -> Found:
    """The data with the val split, or the only split, of other data, whose classes it knows."""
    split = "val" if "val" in val.parts else next(iter(val.parts))
    if split != "val" and len(val.parts) > 1:
        raise UserError(f"{where} must have a val split or only one, but it has {', '.join(val.parts)}.")
    items, targets = val.parts[split]
    targets = val.task.adopt(found.task, {split: targets}, where)[split] if found.task.labelled else targets
    if "val" in found.parts:
        log.info("Validating on %s instead of the data's own val split.", where)

    def make(part: str, items: Array, targets: Targets) -> Split:
        return val.make(split, items, targets) if part == "val" else found.make(part, items, targets)

    unreadable = (*found.unreadable, *val.unreadable)
    return replace(found, parts=found.parts | {"val": (items, targets)}, make=make, unreadable=unreadable)


def _hold_out_fold(
    parts: dict[str, tuple[Array, Targets]],
    found: Found,
    folds: int,
    fold: int,
    seed: int,
    source: object,
) -> dict[str, tuple[Array, Targets]]:
    """Pools train and val and makes one fold val; a test split is unchanged."""
    pool = [parts[split] for split in ("train", "val") if split in parts]
    items, targets = (np.concatenate(halves) for halves in zip(*pool, strict=True))
    if len(targets) < folds:
        raise UserError(f"{source} has {len(targets)} images, too few for {folds} folds.")
    counts = found.task.counts(targets)
    if counts is not None and (single := np.flatnonzero(counts == 1)).size:
        raise UserError(
            f"'{found.classes[single[0]]}' has only one image in {source}, so it cannot be in both train and val. "
            "Add images, or remove the class."
        )
    held = cut_folds(found.task, targets, folds, seed) == fold
    rest = {split: part for split, part in parts.items() if split not in ("train", "val")}
    return {"train": (items[~held], targets[~held]), "val": (items[held], targets[held])} | rest


def folder_kind(folder: Path) -> Literal["classes", "captions", "saved", "files", "shards", "arrays"]:
    """The kind of a data folder.

    Class folders, images with captions, `save_to_disk`, Parquet or Arrow files, tar shards or `.npy` arrays.
    """
    if is_saved(folder):
        return "saved"
    if holds_images(folder):
        return "files"
    if is_shards(folder):
        return "shards"
    if npy_images(folder):
        return "arrays"
    return "captions" if has_captions(folder) else "classes"


def open_source(
    source: Source,
    data_dir: str | None = None,
    image_column: str | None = None,
    label_column: str | Sequence[str] | None = None,
    task: type[Task] | None = None,
    streaming: bool = False,
    model: Task | None = None,
    verify: bool = True,
    image_dir: str | None = None,
    mask_values: Sequence[str] | None = None,
    cache_gb: float | None = None,
) -> Found:
    """The content of a source as stored; without `verify`, files listed in a table are assumed to be readable."""
    if (found := open_annotated(source, task, mask_values)) is not None:
        return found
    how = streaming, model, verify, image_dir, cache_gb
    if task is None or task.labelled:
        opened = _open_source(source, data_dir, image_column, label_column, task, *how)
        if opened.task.annotated and not opened.classes:
            return named_masks(opened, mask_values, full_name(source))
        if mask_values is not None:
            why = "which have their classes" if opened.task.annotated else "but it has none"
            raise UserError(f"--mask-values does not apply to the masks of {full_name(source)}, {why}. Remove it.")
        return opened
    if label_column is not None:
        raise UserError(f"--label-column does not apply to {task.title}, which reads no labels: remove it.")
    found = _open_source(source, data_dir, image_column, None, task, *how)
    return found.without_labels(task())


# The tasks whose targets are annotations, each with what reads them from a folder: None if there are none.
ANNOTATED: dict[type[Task], Callable[[Path, Sequence[str] | None, bool], Found | None]] = {
    Masks: open_masks,
    Boxes: open_boxes,
}


def open_annotated(source: Source, task: type[Task] | None, mask_values: Sequence[str] | None) -> Found | None:
    """A folder of images with masks or other annotations, if that is what it holds and no other task is asked for."""
    readers = [read for kind, read in ANNOTATED.items() if task is None or issubclass(task, kind)]
    if not readers:
        if mask_values is not None:
            raise UserError("--mask-values is for images with masks. Remove it, or --task.")
        return None
    path = Path() if is_object(source) else Path(source).expanduser()
    if is_object(source) or (isinstance(source, str) and source in BUILT_IN) or not path.exists():
        return None
    if is_coco_captions(path) or (path.is_dir() and folder_kind(path) != "classes"):
        return None
    found = next((found for read in readers if (found := read(path, mask_values, task is not None)) is not None), None)
    if found is not None and task is None and isinstance(found.task, Masks) and marked_images(path) is not None:
        log.info("%s has masks and boxes: using the masks. Use --task boxes for the boxes.", path)
    return found


def _open_source(
    source: Source,
    data_dir: str | None,
    image_column: str | None,
    label_column: str | Sequence[str] | None,
    task: type[Task] | None,
    streaming: bool,
    model: Task | None,
    verify: bool,
    image_dir: str | None,
    cache_gb: float | None,
) -> Found:
    if is_object(source):
        if streaming:
            raise UserError(f"{full_name(source)} is in memory, so it cannot be streamed. Remove 'streaming'.")
        return open_object(source, image_column, label_column, task, model, verify, image_dir)
    if isinstance(source, str) and source.startswith(PYTHON):
        raise UserError(
            f"{source} is data that was given as a Python object, which is not stored. Give the data again."
        )
    path = Path(source).expanduser()
    suffix = path.suffix.lower() if path.is_file() else ""
    built_in = isinstance(source, str) and source in BUILT_IN
    kind = folder_kind(path) if path.is_dir() and not built_in else None
    if isinstance(source, str) and source.startswith(PREFIX):
        return open_hub(source, image_column, _single(label_column), streaming, task)
    if kind == "files" or (suffix in (".parquet", ".arrow") and holds_images(path)):
        return open_files(path, image_column, _single(label_column), streaming, task)
    if streaming:
        raise UserError(
            f"Only Hugging Face data sets (hf:NAME) and Parquet or Arrow files with embedded images can be streamed, "
            f"but {source} is neither. Remove --streaming."
        )
    if is_address(source) and image_column is None:
        return open_shards(source, _single(label_column), task, cache_gb)
    if suffix == ".json":
        return open_coco(path, image_dir)
    if suffix in SUFFIXES:
        return open_table(path, image_column, label_column, task, model, verify, image_dir)
    if image_dir is not None:
        raise UserError(f"--image-dir applies to tables ({', '.join(SUFFIXES)}), but {source} is none.")
    if kind == "saved":
        return open_saved(path, image_column, _single(label_column), task)
    if image_column is None and not built_in and is_shards(source):
        return open_shards(source, _single(label_column), task)
    if image_column is not None or label_column is not None:
        raise UserError(
            f"--image-column and --label-column apply to tables ({', '.join(SUFFIXES)}) and Hugging Face data sets, "
            f"but {source} is neither."
        )
    if isinstance(source, str) and built_in:
        if path.exists():
            log.info("Using the built-in data set '%s'. Write ./%s for the folder of that name.", source, source)
        return BUILT_IN[source](data_dir)
    if path.is_dir():
        if kind == "captions" and reads_labels(task) and (task is None or task.several):
            return open_captioned(path)
        return open_npy_folder(path, task) if kind == "arrays" else open_folder(path, task)
    if suffix == ".npz":
        return open_npz(path, task)
    if suffix == ".npy":
        return open_npy(path, task)
    kinds = (
        f"a folder of images, an .npz or .npy file, a table ({', '.join(SUFFIXES)}), COCO's captions (.json), tar "
        f"shards, here or at https://, s3:// or gs://, hf:NAME or a built-in name ({', '.join(BUILT_IN)})"
    )
    if path.exists():
        raise UserError(f"{source} is not a data set. It must be {kinds}.")
    raise UserError(f"There is no data set '{source}'.{nearest(str(source), BUILT_IN)} It must be {kinds}.")


def _single(label_column: str | Sequence[str] | None) -> str | None:
    """The label column of a source that allows only one."""
    if label_column is None or isinstance(label_column, str):
        return label_column
    if len(label_column) > 1:
        raise UserError(f"Only tables may have several label columns, but {', '.join(label_column)} were given.")
    return label_column[0]


def _splits(
    parts: dict[str, tuple[Array, Targets]],
    found: Found,
    val_fraction: float,
    seed: int,
    source: object,
) -> dict[str, Split]:
    if parts.keys() == {"train"}:
        items, targets = parts["train"]
        keep, held = hold_out(found.task, targets, val_fraction, seed)
        if not len(held):
            few = f"one image per {found.task.one}" if found.task.single else f"{len(targets)} images"
            raise UserError(f"{source} has {few}, too few to hold out a validation split. Add images or a val split.")
        parts = {"train": (items[keep], targets[keep]), "val": (items[held], targets[held])}
    splits = {split: found.make(split, items, targets) for split, (items, targets) in parts.items()}
    if "val" not in splits and "test" in splits:
        log.info("%s has no val split: using its test split for validation.", source)
        splits["val"] = splits["test"]
    return {split: splits[split] for split in ("train", "val", "test", "all") if split in splits}
