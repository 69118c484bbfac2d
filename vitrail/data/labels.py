"""Labels as Python objects, in the form of label arrays: classes, numbers, 0/1 per label, or lists of names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vitrail.data.arrays import read_labels
from vitrail.data.dataset import Array, Targets
from vitrail.data.image_like import as_array, is_array, shown
from vitrail.errors import UserError
from vitrail.progress import log
from vitrail.tasks import Task, task_type
from vitrail.tasks.captions import joined


def label_array(labels: Any, where: str, names: tuple[str, ...] | None = None) -> tuple[Array, tuple[str, ...] | None]:
    """Labels as an array, (N,) of integers, text or floats, or (N, K) of numbers, and the names of K labels.

    Lists of names, or of their numbers if `names` are known, become 0 and 1 per label.
    """
    if is_array(labels):
        array = as_array(labels)
        if array.dtype.kind == "O":  # text in a pandas Series
            return label_array(array.tolist(), where, names)
        if array.ndim == 2 and array.shape[1] == 1 and array.dtype.kind in "iubUS":
            array = array[:, 0]
        return array.astype(np.int64) if array.dtype.kind == "b" and array.ndim == 1 else array, names
    values = [_plain(label, i, where) for i, label in enumerate(labels)]
    kinds = {type(value) for value in values}
    if kinds <= {list}:
        return _lists(values, where, names)
    if kinds <= {str}:
        return np.array(values, dtype=np.str_), names
    if kinds <= {int}:
        return np.array(values, dtype=np.int64), names
    if kinds <= {int, float}:
        return np.array(values, dtype=np.float64), names
    listed = " and ".join(sorted(kind.__name__ for kind in kinds))
    raise UserError(f"{where}: labels must all be integers, text, numbers or lists, but they are {listed}.")


def _plain(label: Any, number: int, where: str) -> Any:
    """A label as int, float, str, or a list of these."""
    if is_array(label):
        label = as_array(label).tolist()  # a number, if it has no dimension
    elif isinstance(label, np.generic):
        label = label.item()
    if isinstance(label, bool):
        return int(label)
    if isinstance(label, int | float | str):
        return str(label) if isinstance(label, str) else label
    if isinstance(label, set | frozenset):
        return sorted(_plain(part, number, where) for part in label)
    if isinstance(label, Sequence):
        return [_plain(part, number, where) for part in label]
    what = "is missing" if label is None else f"is {shown(label)}"
    raise UserError(
        f"{where}: a label must be an integer, text, a number or a list of them, but label {number} {what}."
    )


def _lists(values: list[list[Any]], where: str, names: tuple[str, ...] | None) -> tuple[Array, tuple[str, ...] | None]:
    parts = {part for value in values for part in value}
    if not all(isinstance(part, str) for part in parts) and names is None:
        lengths = {len(value) for value in values}
        if len(lengths) > 1:
            raise UserError(
                f"{where}: lists of numbers must have one length, but they have {min(lengths)} to {max(lengths)}. For "
                "several labels per image, give lists of names, or 0 or 1 for each label."
            )
        return np.array(values), None
    known = names or tuple(sorted(parts))
    index: dict[Any, int] = {name: k for k, name in enumerate(known)} | {k: k for k in range(len(known))}
    hot = np.zeros((len(values), len(known)), dtype=np.float32)
    for i, value in enumerate(values):
        for part in value:
            if part not in index:
                raise UserError(f"{where}: label {i} has {part!r}, which is none of the {len(known)} labels.")
            hot[i, index[part]] = 1
    return hot, known


def labelled_splits(
    labels: Mapping[str, Sequence[Any]], names: tuple[str, ...] | None, source: str, captions: bool = False
) -> tuple[Task, dict[str, Targets]]:
    """The task, and the targets of every labelled split; text, or lists of it, may be captions.

    Public test sets are often unlabelled.
    """
    kept: dict[str, Sequence[Any]] = {}
    for split, values in labels.items():
        if split != "train" and len(values) and all(value in (None, -1) for value in values):
            log.info("%s: skipping the %s split, which has no labels.", source, split)
            continue
        if None in values:
            raise UserError(f"{source}: row {values.index(None)} of the {split} split has no label. Remove it.")
        if invalid := [value for value in values if not isinstance(value, int | float | str | list)]:
            raise UserError(
                f"{source}: a label must be an integer, text, a number or a list of them, but one in the {split} split "
                f"is {invalid[0]!r}. Choose another column with --label-column."
            )
        kept[split] = values
    if captions:
        texts = [joined([value] if isinstance(value, str) else value) for values in kept.values() for value in values]
        task, packed = task_type("pairs").from_text({"caption": texts}, range(len(texts)), source)
        parts = np.split(packed, np.cumsum([len(values) for values in kept.values()])[:-1])
        return task, dict(zip(kept, parts, strict=True))
    every, known = label_array([value for values in kept.values() for value in values], source, names)
    ends = np.cumsum([len(values) for values in kept.values()])[:-1]
    task, targets = read_labels(np.split(every, ends), known, source, None)
    return task, dict(zip(kept, targets, strict=True))
