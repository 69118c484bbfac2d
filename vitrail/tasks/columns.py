"""Targets with a column for each label or value, (N, K) float32: read from tables and arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from vitrail.errors import UserError
from vitrail.tasks.scores import Array, Targets
from vitrail.tasks.task import Columns, Task


def read_columns(
    columns: Columns, rows: Sequence[int], where: str, read: Callable[[str], float | None], rule: str
) -> Targets:
    """The cells of a table's columns as numbers; `read` gives None for a cell that breaks the rule."""
    targets = np.empty((len(rows), len(columns)), dtype=np.float32)
    for k, (name, cells) in enumerate(columns.items()):
        for i, cell in enumerate(cells):
            value = read(cell)
            if value is None:
                raise UserError(f"{where}: '{name}' must be {rule}, but in row {rows[i]} it is '{cell}'.")
            targets[i, k] = value
    return targets


def float_columns(labels: Sequence[Array], where: str, rule: str, valid: Callable[[Array], Array]) -> list[Targets]:
    """Label arrays, (N,) or (N, K), as (N, K) float32."""
    columns = [y[:, None] if y.ndim == 1 else y for y in labels]
    k = columns[0].shape[1]
    for y in columns:
        if not (y.ndim == 2 and y.shape[1] == k > 0 and y.dtype.kind in "buif" and valid(y).all()):
            raise UserError(f"{where}: labels must be {rule}, (N, K), but some are not: {y.dtype} of shape {y.shape}.")
    return [y.astype(np.float32) for y in columns]


def column_names(
    targets: Sequence[Targets], names: Sequence[str] | None, where: str, task: type[Task]
) -> tuple[str, ...]:
    """The names that were given for the columns, or their numbers."""
    k = targets[0].shape[1]
    if names is None:
        return tuple(str(i) for i in range(k))
    if len(names) != k:
        raise UserError(f"{where}: there are {len(names)} names in classes for {k} {task.many}.")
    return tuple(names)


def alike(name: str, source: object) -> UserError:
    """The error for targets that are the same for all training images."""
    return UserError(
        f"All training images of {source} have the same '{name}': there is nothing to learn. "
        "Choose other columns with --label-column."
    )
