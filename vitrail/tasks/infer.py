"""Infers the task from labels, and parses labels given as text.

| task       | labels as text                                        | targets                 |
|------------|-------------------------------------------------------|-------------------------|
| multiclass | one name                                              | (N,) int64              |
| multilabel | several names in a cell, or a column of 0/1 for each  | (N, K) float32, 0 and 1 |
| regression | one column of numbers or more                         | (N, K) float32          |
| pairs      | captions, in a column named so, or of several words   | (N, C, L) uint8         |
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np

from vitrail.tasks.captions import are_captions, are_named
from vitrail.tasks.scores import Array
from vitrail.tasks.task import Columns

SEPARATORS = ("|", ";", ",")  # between labels in a cell
FEW_VALUES, OFTEN = 20, 5  # integers are classes if they have few values, or if each occurs this often on average

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_BINARY = {"0": 0.0, "1": 1.0, "0.0": 0.0, "1.0": 1.0, "false": 0.0, "true": 1.0}


def infer_from_text(columns: Columns) -> str:
    """The name of the task of a table's label columns.

    Several columns are labels if they hold only 0 and 1, otherwise values. A numeric column is a regression if it has
    fractions, or many values that seldom repeat; a text column is multi-label if its cells combine names.
    """
    if len(columns) > 1:
        return "multilabel" if all(map(are_binary, columns.values())) else "regression"
    ((name, every),) = columns.items()
    cells = [cell for cell in every if cell]
    if are_named(name) or are_captions(cells):
        return "pairs"
    if all(map(_NUMBER.fullmatch, cells)):
        values = [float(cell) for cell in cells]
        different = len(set(values))
        seldom = different > FEW_VALUES and len(values) < OFTEN * different
        return "regression" if seldom or any(value % 1 for value in values) else "multiclass"
    return "multilabel" if any(_combines(cells, separator) for separator in SEPARATORS) else "multiclass"


def infer_from_arrays(labels: Sequence[Array]) -> str:
    """The name of the task of label arrays: (N, K) of 0 and 1, other floats, or one class per image."""
    if all(y.ndim == 2 and y.shape[1] > 1 and y.dtype.kind in "buif" and np.isin(y, (0, 1)).all() for y in labels):
        return "multilabel"
    return "regression" if all(y.dtype.kind == "f" for y in labels) else "multiclass"


def are_binary(cells: Iterable[str]) -> bool:
    """Whether all cells are 0 or 1, or false or true."""
    return all(binary(cell) is not None for cell in cells)


def binary(cell: str) -> float | None:
    """A cell as 0 or 1; None if it is neither."""
    return _BINARY.get(cell.lower())


def number(cell: str) -> float | None:
    """A cell as a finite float32; None if it is not one."""
    value = float(cell) if _NUMBER.fullmatch(cell) else np.inf
    return value if abs(value) <= float(np.finfo(np.float32).max) else None


def split_labels(cells: Sequence[str], known: Sequence[str] | None) -> list[list[str]]:
    """The labels in each cell; `known` are those of a trained model."""
    separator = _separator(cells, known)
    return [_parts(cell, separator) for cell in cells]


def _separator(cells: Sequence[str], known: Sequence[str] | None) -> str:
    """The separator of labels: a space if no other occurs, none if entire cells are known labels."""
    if known is not None:
        names = set(known)
        for separator in (*SEPARATORS, "", " "):
            if all(names.issuperset(_parts(cell, separator)) for cell in cells):
                return separator
    combining = (separator for separator in SEPARATORS if _combines(cells, separator))
    occurring = (separator for separator in SEPARATORS if any(separator in cell for cell in cells))
    return next(combining, None) or next(occurring, " ")


def _combines(cells: Sequence[str], separator: str) -> bool:
    """Whether cells combine names, rather than being names with a separator in them: then there are fewer parts."""
    if not any(separator in cell for cell in cells):
        return False
    whole = {cell for cell in cells if cell}
    return separator == "|" or len({part for cell in whole for part in _parts(cell, separator)}) < len(whole)


def _parts(cell: str, separator: str) -> list[str]:
    parts = [cell] if not separator else cell.split() if separator == " " else cell.split(separator)
    return [part.strip() for part in parts if part.strip()]
