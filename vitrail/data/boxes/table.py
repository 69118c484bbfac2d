"""Tables with a row per box: a column of images, one of classes, and four of coordinates.

Corners (`xmin, ymin, xmax, ymax` and other spellings) or a corner with a size (`x, y, width, height`), in pixels. An
image whose row has no box has no objects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from vitrail.data.boxes.marked import Marked, Object, number
from vitrail.errors import UserError

_CORNERS = (
    ("xmin", "ymin", "xmax", "ymax"),
    ("x_min", "y_min", "x_max", "y_max"),
    ("x0", "y0", "x1", "y1"),
    ("x1", "y1", "x2", "y2"),
    ("left", "top", "right", "bottom"),
)
_SIZES = (("x", "y", "w", "h"), ("x", "y", "width", "height"), ("left", "top", "width", "height"))


def box_columns(names: Sequence[str]) -> tuple[tuple[str, ...], bool] | None:
    """The four columns of a table with boxes, and whether the last two are a size; None if it has none."""
    by_lower = {name.lower(): name for name in reversed(names)}
    for spelled in (*_CORNERS, *_SIZES):
        if all(name in by_lower for name in spelled):
            return tuple(by_lower[name] for name in spelled), spelled in _SIZES
    return None


def read_rows(
    rows: Mapping[int, Sequence[str]],
    columns: Mapping[str, int],
    box: tuple[tuple[str, ...], bool],
    label: str,
    files: Mapping[int, Path],
    splits: Mapping[int, str],
    path: str,
) -> list[Marked]:
    """The images of a table and their boxes; `files` and `splits` are by row number."""
    found: dict[Path, tuple[str, list[Object]]] = {}
    for row, cells in rows.items():
        split, objects = found.setdefault(files[row], (splits[row], []))
        if split != splits[row]:
            raise UserError(f"{path}: row {row} puts {files[row]} into {splits[row]}, but another row into {split}.")
        texts, name = [cells[columns[column]] for column in box[0]], cells[columns[label]]
        if not any(texts) and not name:
            continue
        if not name:
            raise UserError(f"{path}: row {row} has a box but no {label}. Fill in the cell or remove the row.")
        x, y, a, b = (
            number(text, f"'{column}' of row {row}", path) for text, column in zip(texts, box[0], strict=True)
        )
        objects.append(Object(name, (x, y, x + a, y + b) if box[1] else (x, y, a, b)))
    return [Marked(file, split, objects, f"{path}, {file.name}") for file, (split, objects) in found.items()]
