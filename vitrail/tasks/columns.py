"""Targets with one column per label or value, (N, K) float32, from tables and arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from vitrail.errors import UserError
from vitrail.tasks.scores import Array, Targets
from vitrail.tasks.task import Columns, Task


def read_columns(
    columns: Columns, rows: Sequence[int], where: str, read: Callable[[str], float | None], rule: str
) -> Targets:
    """The cells of label columns as numbers; `read` returns None for an invalid cell."""
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
            raise UserError(f"{where}: labels must be {rule}, (N, K), but got {y.dtype} of shape {y.shape}.")
    return [y.astype(np.float32) for y in columns]


def column_names(
    targets: Sequence[Targets], names: Sequence[str] | None, where: str, task: type[Task]
) -> tuple[str, ...]:
    """The given names of the columns, or their indices."""
    k = targets[0].shape[1]
    if names is None:
        return tuple(str(i) for i in range(k))
    if len(names) != k:
        raise UserError(f"{where}: 'classes' has {len(names)} names, but there are {k} {task.many}.")
    return tuple(names)


def alike(name: str, source: object) -> UserError:
    """The error for targets that are the same for all training images."""
    return UserError(
        f"'{name}' must vary, but it is the same for all training images of {source}. "
        "Choose other columns with --label-column."
    )
