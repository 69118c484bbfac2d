"""What labels mean: the task that they ask for, their targets, and what each task needs of a split.

| task       | labels as text                                        | targets                 |
|------------|-------------------------------------------------------|-------------------------|
| multiclass | one name                                              | (N,) int64              |
| multilabel | several names in a cell, or a column of 0/1 for each  | (N, K) float32, 0 and 1 |
| regression | one column of numbers or more                         | (N, K) float32          |
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vitrail.data.dataset import Found, Numbers, Targets, Task
from vitrail.errors import UserError, nearest, shortlist

Columns = Mapping[str, Sequence[str]]  # the cells of every column of labels, as text

SEPARATORS = ("|", ";", ",")  # between the labels of a cell
FEW_VALUES, OFTEN = 20, 5  # whole numbers are classes if they are no more than these, or occur so often on average

_BINS = 10
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_BINARY = {"0": 0.0, "1": 1.0, "0.0": 0.0, "1.0": 1.0, "false": 0.0, "true": 1.0}


class Words(NamedTuple):
    """What a task is called, and what it tells: one, and many."""

    title: str
    one: str
    many: str


WORDS: dict[Task, Words] = {
    "multiclass": Words("multi-class", "class", "classes"),
    "multilabel": Words("multi-label", "label", "labels"),
    "regression": Words("regression", "number", "numbers"),
}


def titled(task: Task, classes: Sequence[str]) -> str:
    """A task in words: "multi-label, 12 labels"."""
    words = WORDS[task]
    return f"{words.title}, {len(classes)} {words.one if len(classes) == 1 else words.many}"


# From text ----------------------------------------------------------------------------------------------


def infer_task(columns: Columns) -> Task:
    """What some columns of labels ask for, by what they hold.

    Several columns are labels if they hold 0 and 1 only, and numbers otherwise. One column of numbers is a
    regression if some have fractions, or if they are many and seldom repeat; one column of text is multi-label if
    its cells are combinations of names.
    """
    if len(columns) > 1:
        return "multilabel" if all(map(are_binary, columns.values())) else "regression"
    cells = [cell for cell in next(iter(columns.values())) if cell]
    if all(map(_NUMBER.fullmatch, cells)):
        values = [float(cell) for cell in cells]
        different = len(set(values))
        seldom = different > FEW_VALUES and len(values) < OFTEN * different
        return "regression" if seldom or any(value % 1 for value in values) else "multiclass"
    return "multilabel" if any(_combines(cells, separator) for separator in SEPARATORS) else "multiclass"


def are_binary(cells: Iterable[str]) -> bool:
    """Whether all cells are 0 or 1, or false or true."""
    return all(cell.lower() in _BINARY for cell in cells)


def from_text(
    columns: Columns, task: Task, rows: Sequence[int], where: str, known: Sequence[str] | None = None
) -> tuple[tuple[str, ...], Targets]:
    """The names and the targets of a multi-label task or a regression; `known` are the labels of a trained model."""
    if task == "multilabel":
        if len(columns) == 1 and not are_binary(next(iter(columns.values()))):
            return _from_lists(next(iter(columns.values())), known)
        read, rule = _flag, "0 or 1"
    else:
        read, rule = _number, "a number"
    targets = np.empty((len(rows), len(columns)), dtype=np.float32)
    for k, (name, cells) in enumerate(columns.items()):
        for i, cell in enumerate(cells):
            value = read(cell)
            if value is None:
                raise UserError(f"{where}: '{name}' must be {rule}, but in row {rows[i]} it is '{cell}'.")
            targets[i, k] = value
    return tuple(columns), targets


def _flag(cell: str) -> float | None:
    return _BINARY.get(cell.lower())


def _number(cell: str) -> float | None:
    value = float(cell) if _NUMBER.fullmatch(cell) else np.inf
    return value if abs(value) <= float(np.finfo(np.float32).max) else None


def _from_lists(cells: Sequence[str], known: Sequence[str] | None) -> tuple[tuple[str, ...], Targets]:
    separator = _separator(cells, known)
    lists = [_parts(cell, separator) for cell in cells]
    classes = tuple(sorted({label for labels in lists for label in labels}))
    numbers = {label: number for number, label in enumerate(classes)}
    targets = np.zeros((len(cells), len(classes)), dtype=np.float32)
    for row, labels in zip(targets, lists, strict=True):
        row[[numbers[label] for label in labels]] = 1
    return classes, targets


def _separator(cells: Sequence[str], known: Sequence[str] | None) -> str:
    """What stands between the labels of a cell; a space if it is nothing else, and nothing if names are known whole."""
    if known is not None:
        names = set(known)
        for separator in (*SEPARATORS, "", " "):
            if all(names.issuperset(_parts(cell, separator)) for cell in cells):
                return separator
    combining = (separator for separator in SEPARATORS if _combines(cells, separator))
    occurring = (separator for separator in SEPARATORS if any(separator in cell for cell in cells))
    return next(combining, None) or next(occurring, " ")


def _combines(cells: Sequence[str], separator: str) -> bool:
    """Whether cells are combinations of names rather than names with a comma in them: there are fewer parts then."""
    if not any(separator in cell for cell in cells):
        return False
    whole = {cell for cell in cells if cell}
    return separator == "|" or len({part for cell in whole for part in _parts(cell, separator)}) < len(whole)


def _parts(cell: str, separator: str) -> list[str]:
    parts = [cell] if not separator else cell.split() if separator == " " else cell.split(separator)
    return [part.strip() for part in parts if part.strip()]


def in_words(task: Task, classes: Sequence[str], targets: Targets) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The label of every image as text, and the classes, labels or numbers that it is an example of."""
    for target in targets:
        if task == "multiclass":
            yield classes[target], (classes[target],)
        elif task == "multilabel":
            labels = tuple(classes[k] for k in np.flatnonzero(target))
            yield "|".join(labels) or "(none)", labels or ("(none)",)
        else:
            yield ", ".join(f"{value:g}" for value in target), tuple(classes)


# In splits ----------------------------------------------------------------------------------------------


def check_trainable(found: Found, source: object) -> None:
    """Refuses data from which nothing can be learnt, or not all that it is measured by."""
    if "train" not in found.parts:
        raise UserError(f"{source} has no train split, only {' and '.join(found.parts)}.")
    targets, classes = found.parts["train"][1], found.classes
    if found.task == "multiclass":
        trained = np.unique(targets)
        if len(trained) < 2:
            raise UserError(f"{source} has one class only, '{classes[trained[0]]}': a classifier needs two or more.")
        for split, (_, others) in found.parts.items():
            strange = np.setdiff1d(others, trained)
            if len(strange):
                raise UserError(
                    f"The class '{classes[strange[0]]}' is in the {split} split of {source}, but train has "
                    "no image of it. Add some to train, or remove the class."
                )
        return
    if not classes:
        raise UserError(f"No image of {source} has a label: there is nothing to learn.")
    same = np.ptp(targets, axis=0) == 0
    never = same & (targets[0] == 0)
    if found.task == "multilabel" and never.any():
        raise UserError(
            f"The label '{classes[int(never.argmax())]}' of {source} is not on any image of train. "
            "Add some that have it, or leave it out."
        )
    if same.all() or (found.task == "regression" and same.any()):
        raise UserError(
            f"All training images of {source} have the same '{classes[int(same.argmax())]}': there is nothing to "
            "learn. Choose other columns with --label-column."
        )


def reorder(found: Found, classes: Sequence[str], source: object) -> dict[str, Targets]:
    """The targets of every split as a trained model with these classes has them."""
    words = WORDS[found.task]
    numbers = {name: number for number, name in enumerate(classes)}
    for name in found.classes:
        if name not in numbers:
            raise UserError(
                f"{source} has a {words.one} '{name}' that the model does not know.{nearest(name, classes)} "
                f"The model's {len(classes)} {words.many} are {shortlist(classes, 10)}."
            )
    order = np.array([numbers[name] for name in found.classes], dtype=np.int64)
    if found.task == "multiclass":
        return {split: order[targets] for split, (_, targets) in found.parts.items()}
    missing = sorted(set(classes) - set(found.classes))
    if missing and found.task == "regression":
        raise UserError(f"{source} lacks the numbers {shortlist(missing, 5)}, which the model was trained to tell.")
    moved: dict[str, Targets] = {}
    for split, (_, targets) in found.parts.items():
        moved[split] = np.zeros((len(targets), len(classes)), dtype=np.float32)
        moved[split][:, order] = targets
    return moved


def strata(task: Task, targets: Targets, fraction: float) -> Numbers:
    """A number for every image such that images with the same one are alike, to split them evenly.

    That is the class, or the rarest label of an image, or the tenth of the range in which its (first) number ranks.
    """
    if task == "multiclass":
        return targets
    if task == "multilabel":
        rarity = np.where(targets > 0, targets.sum(axis=0), np.inf)
        return np.where(targets.any(axis=1), rarity.argmin(axis=1), targets.shape[1])
    bins = min(max(int(len(targets) * fraction), 1), _BINS)  # no more than one image of each is held out if few are
    ranks = np.argsort(np.argsort(targets[:, 0], kind="stable"), kind="stable")
    return ranks * bins // len(targets)
