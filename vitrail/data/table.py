"""Tables of images: CSV, TSV or Parquet with one row per image, a column of paths and one or more label columns."""

from __future__ import annotations

import csv
import glob
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from vitrail.config import coerce_names
from vitrail.data.boxes import from_marked
from vitrail.data.boxes.table import box_columns, read_rows
from vitrail.data.dataset import Found, reads_labels
from vitrail.data.folder import SPLITS, from_files, from_paths, is_image, subfolders
from vitrail.errors import UserError, nearest
from vitrail.files import open_regular, reading
from vitrail.progress import log
from vitrail.tasks import Task, other_tasks, task_type
from vitrail.tasks.captions import COLUMNS as CAPTIONS
from vitrail.tasks.captions import joined
from vitrail.tasks.infer import are_binary, infer_from_text

SUFFIXES = (".csv", ".tsv", ".parquet")

_IMAGE_NAMES = ("image", "image_path", "path", "file", "filename", "filepath", "img")
_ID_NAMES = ("image_id", "image_name", "img_id", "id_code", "id")  # Kaggle's, of files without their suffix
_LABEL_NAMES = ("label", "class", "target", "category", "y", "labels", "tags", *CAPTIONS)

Rows = dict[int, list[str]]  # stripped cells, by spreadsheet row number; the parts of a list are lines

_LONGEST = 3000  # characters of a cell: a path, labels or a number
_LINE = 2**20  # characters of a line
_BATCH, _FEW, _MOST = 2**14, 100_000, 2**30  # of a Parquet file: rows to read at once, values of any and of the largest


def open_table(
    path: Path,
    image_column: str | None = None,
    label_column: str | Sequence[str] | None = None,
    task: type[Task] | None = None,
    model: Task | None = None,
    verify: bool = True,
    image_dir: str | None = None,
) -> Found:
    """The images listed in a table file; paths are relative to `image_dir`, or to the folder of the table."""
    folder = path.parent if image_dir is None else Path(image_dir).expanduser()
    names, rows = _read_parquet(path) if path.suffix.lower() == ".parquet" else _read_text(path)
    columns = image_column, label_column
    return _from_rows(names, rows, path.stem, str(path), folder, *columns, task, model, verify)


def open_columns(
    columns: Sequence[tuple[str, Sequence[object]]],
    name: str,
    where: str,
    folder: Path,
    image_column: str | None = None,
    label_column: str | Sequence[str] | None = None,
    task: type[Task] | None = None,
    model: Task | None = None,
    verify: bool = True,
) -> Found:
    """The images listed in the columns of a data frame; paths are relative to `folder`."""
    cells = [[_as_text(cell) for cell in column] for _, column in columns]
    rows = {number: list(row) for number, row in enumerate(zip(*cells, strict=True), 1)}
    given = image_column, label_column
    return _from_rows([label for label, _ in columns], rows, name, where, folder, *given, task, model, verify)


def _from_rows(
    names: Sequence[str],
    rows: Rows,
    title: str,
    path: str,
    folder: Path,
    image_column: str | None,
    label_column: str | Sequence[str] | None,
    task: type[Task] | None,
    model: Task | None,
    verify: bool,
) -> Found:
    """The images listed in rows, split by the column `split` if there is one; `path` names the table in messages.

    Columns and task are inferred from names and values unless given; a task that reads no labels needs no label column.
    `model` is the task of a trained model. Images are in `folder`; a name may lack its suffix.
    """
    if not folder.is_dir():
        raise UserError(f"--image-dir must be a folder, but {folder} is none.")
    if not rows:
        raise UserError(f"{path} has no rows. It must have one per image.")
    for number, cells in {0: names, **rows}.items():
        if any(len(cell) > _LONGEST or "\0" in cell for cell in cells):
            where = f"row {number}" if number else "the header"
            raise UserError(
                f"{path}: {where} has a cell of more than {_LONGEST:,} characters, or with a NUL character."
            )
    columns = {name: i for i, name in enumerate(names) if name}  # pandas writes its index without a name
    if len(columns) < sum(map(bool, names)):
        duplicate = next(name for name in columns if names.count(name) > 1)
        raise UserError(f"{path} has two columns named '{duplicate}'. Rename one.")
    given = () if label_column is None else coerce_names("label_column", label_column)
    if not given and model is not None and not model.single and columns.keys() >= set(model.classes):
        given = model.classes
    box = box_columns(names) if not given and (task is None or task.annotated) else None
    if box is not None:
        given = _class_column(path, [name for name in columns if name not in box[0]])
    image, labels, split = _choose(path, columns, rows, image_column, given, reads_labels(task))
    texts = {label: [_labels(cells[columns[label]]) for cells in rows.values()] for label in labels}
    kind = task or task_type(infer_from_text(texts))
    if kind.single and len(labels) > 1:
        raise UserError(
            f"{path}: a {kind.title} task needs one label column, but there are {len(labels)}: {', '.join(labels)}."
        )
    listed = ", ".join(f"'{label}'" for label in labels)
    log.info("%s: images are in the column '%s'%s.", path, image, f", labels in {listed}" if labels else "")

    files = _with_suffixes(folder, [cells[columns[image]] for cells in rows.values()])
    if verify and not any(file.exists() for file in files.values()):
        raise UserError(_all_missing(path, image, folder, next(iter(files.values()))))
    if box is not None:
        named = {number: files[cells[columns[image]]] for number, cells in rows.items()}
        parts = {number: _split(path, number, cells, columns, split) for number, cells in rows.items()}
        return from_marked(title, read_rows(rows, columns, box, labels[0], named, parts, path), path)
    known: dict[Path, tuple[list[str], str, int]] = {}
    for number, cells in rows.items():
        file, own, part = (
            files[cells[columns[image]]],
            [cells[columns[label]] if kind.several else _labels(cells[columns[label]]) for label in labels],
            _split(path, number, cells, columns, split),
        )
        for column, cell in ((image, cells[columns[image]]), *zip(labels, own, strict=True)):
            # An empty cell is a valid list of labels, but not a valid class, 0/1 or number.
            if not cell and (column == image or not kind.optional or len(labels) > 1):
                raise UserError(f"{path}: row {number} has no {column}. Fill in the cell or remove the row.")
        before, where, _ = known.setdefault(file, (own, part, number))
        if before != own and kind.several:
            before[:] = own = [joined([*a.split("\n"), *b.split("\n")]) for a, b in zip(before, own, strict=True)]
        if before != own:
            was, now = ", ".join(before), ", ".join(own)
            raise UserError(f"{path}: {file} has two labels, '{was}' and, in row {number}, '{now}'.")
        if where != part:
            raise UserError(f"{path}: {file} is in two splits, {where} and, in row {number}, {part}.")
    if len(known) < len(rows) and not kind.several:
        repeated = len(rows) - len(known)
        log.warning("%s: skipping %d duplicate %s.", path, repeated, "row" if repeated == 1 else "rows")
    if kind.single or not labels:
        found = _by_class(title, path, known, verify)
    else:
        found = _by_row(title, path, known, labels, kind, model, verify)
    if task is None:
        log.info("task: %s, inferred from %s; override it with --task %s.", found.task, listed, other_tasks(kind))
    return found


def _split(path: str, number: int, cells: Sequence[str], columns: Mapping[str, int], split: str | None) -> str:
    """The split of a row; "train" without a column of splits."""
    if split is None:
        return "train"
    word = cells[columns[split]]
    if word.lower() not in SPLITS:
        raise UserError(f"{path}: the split in row {number} must be train, val or test, but it is '{word}'.")
    return SPLITS[word.lower()]


def _class_column(path: str, columns: Sequence[str]) -> tuple[str, ...]:
    """The column with the classes of boxes."""
    named = _named(columns, (*_LABEL_NAMES, "name", "object", "class_name", "category_name"))
    if named is None:
        raise UserError(f"{path}: which of the columns {', '.join(columns)} has the classes? Set --label-column.")
    return (named,)


def _with_suffixes(home: Path, names: Sequence[str]) -> dict[str, Path]:
    """The file of each name in a folder; a name without a suffix, as in Kaggle's tables, gets that of its file."""
    folders: dict[Path, dict[str, str]] = {}
    files = {}
    for name in names:
        file = home / name
        if name and not is_image(file):
            if file.parent not in folders:
                there = sorted(file.parent.iterdir()) if file.parent.is_dir() else []
                folders[file.parent] = {other.stem: other.name for other in reversed(there) if is_image(other)}
            file = file.with_name(folders[file.parent].get(file.name, file.name))
        files[name] = file
    return files


def _all_missing(path: str, column: str, home: Path, first: Path) -> str:
    """The message for a table none of whose images exist, with the folder that has the first one."""
    places = [folder for folder in subfolders(home) if any(folder.glob(f"{glob.escape(first.stem)}.*"))]
    hint = f"Use --image-dir {max(places, key=_count)}." if places else "Set --image-dir to the folder of the images."
    return f"None of the images in the column '{column}' of {path} exist: {first} is the first. {hint}"


def _count(folder: Path) -> int:
    return sum(1 for _ in folder.iterdir())


def _by_class(title: str, path: str, known: Mapping[Path, tuple[list[str], str, int]], verify: bool) -> Found:
    files: dict[str, dict[str, list[Path]]] = {}
    for file, (labels, part, _) in known.items():
        files.setdefault(part, {}).setdefault("".join(labels), []).append(file)  # one label, or none
    return from_files(title, files, path, verify)


def _by_row(
    title: str,
    path: str,
    known: Mapping[Path, tuple[list[str], str, int]],
    labels: Sequence[str],
    task: type[Task],
    model: Task | None,
    verify: bool,
) -> Found:
    texts, parts, numbers = zip(*known.values(), strict=True)
    columns = dict(zip(labels, zip(*texts, strict=True), strict=True))
    read, targets = task.from_text(columns, numbers, path, None if model is None else model.classes)
    files, where = np.array(list(known), dtype=object), np.array(parts)
    listed = {part: (files[where == part], targets[where == part]) for part in dict.fromkeys(parts)}
    return from_paths(title, read, listed, verify)


def _choose(
    path: str, columns: Mapping[str, int], rows: Rows, image: str | None, labels: tuple[str, ...], labelled: bool
) -> tuple[str, tuple[str, ...], str | None]:
    """The image column, the label columns, none unless `labelled`, and, if there is one, the split column."""
    for given in (image, *labels):
        if given is not None and given not in columns:
            raise UserError(f"{path} has no column '{given}'.{nearest(given, columns)} It has {', '.join(columns)}.")
    if image in labels:
        raise UserError(f"{path}: '{image}' cannot be both the image column and the label column.")
    if len(set(labels)) < len(labels):
        raise UserError(f"{path}: a label column is given twice in {', '.join(labels)}.")
    free = [name for name in columns if name not in (image, *labels)]
    split = _named(free, ["split"])
    free = [name for name in free if name != split]
    if image is None:
        image = _named(free, _IMAGE_NAMES) or next((name for name in free if _are_images(rows, columns[name])), None)
        image = image or _named(free, _ID_NAMES)
        if image is None:
            raise UserError(f"{path}: which of the columns {', '.join(columns)} has the paths? Set --image-column.")
        free.remove(image)
    if labelled and not labels:
        named = _named(free, _LABEL_NAMES)
        if named in ("y", "Y") and _named(free, ["x"]):  # coordinates: y alone is not the label
            named = None
        binary = bool(free) and all(are_binary(cells[columns[name]] for cells in rows.values()) for name in free)
        if not free:
            raise UserError(f"{path} has no column of labels or captions: it has {', '.join(columns)}. Add one.")
        if named is None and len(free) != 1 and not binary:
            raise UserError(f"{path}: which of the columns {', '.join(columns)} has the labels? Set --label-column.")
        labels = tuple(free) if named is None else (named,)
    return image, labels, split


def _named(columns: Sequence[str], names: Sequence[str]) -> str | None:
    """The column that matches the first possible name, case-insensitive."""
    by_lower = {column.lower(): column for column in reversed(columns)}
    return next((by_lower[name] for name in names if name in by_lower), None)


def _are_images(rows: Rows, column: int) -> bool:
    cells = [row[column] for row in rows.values() if row[column]]
    return bool(cells) and all(map(is_image, cells))


def _read_text(path: Path) -> tuple[list[str], Rows]:
    """The column names and the rows of a CSV or TSV file; empty rows are skipped."""
    try:
        with io.TextIOWrapper(open_regular(path), encoding="utf-8-sig", newline="") as file:
            first = file.readline(_LINE)
            file.seek(0)
            delimiter = ";" if ";" in first and "," not in first else ","
            reader = csv.reader(
                _lines(file, path), delimiter="\t" if path.suffix.lower() == ".tsv" else delimiter, strict=True
            )
            try:
                lines = {number: [_as_text(cell) for cell in cells] for number, cells in enumerate(reader, 1)}
            except csv.Error as error:
                raise UserError(f"{path}: line {reader.line_num} is not valid CSV: {error}.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} must be UTF-8 text: {error.reason} at byte {error.start}.") from error
    lines = {number: cells for number, cells in lines.items() if any(cells)}
    if not lines:
        raise UserError(f"{path} is empty. It must have a header row with column names, and one row per image.")
    names = lines.pop(min(lines))
    if any(is_image(name) for name in names):
        raise UserError(f"{path} must have a header row with column names, but its first row is {', '.join(names)}.")
    for number, cells in lines.items():
        if len(cells) != len(names):
            raise UserError(f"{path}: row {number} has {len(cells)} cells, but the header has {len(names)}.")
    return names, lines


def _lines(file: TextIO, path: Path) -> Iterator[str]:
    """The lines of a table. A sparse file may be one line of any length."""
    while line := file.readline(_LINE + 1):
        if len(line) > _LINE:
            raise UserError(f"{path} has a line of more than {_LINE:,} characters. A table has a line for each row.")
        yield line


def _read_parquet(path: Path) -> tuple[list[str], Rows]:
    """The column names and the rows of a Parquet file."""
    try:
        import pyarrow  # type: ignore[import-not-found,import-untyped,unused-ignore]
        import pyarrow.parquet  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as error:
        raise UserError(f"{path}: reading Parquet needs pyarrow: pip install 'vitrail[data]'") from error
    known: dict[str, str] = {}  # equal cells share one text
    with (
        reading(path, "a readable Parquet file"),
        open_regular(path) as stream,
        pyarrow.parquet.ParquetFile(stream) as file,
    ):
        _check_values(file.metadata, path.stat().st_size)
        names = [name.strip() for name in file.schema_arrow.names]
        rows: list[list[str]] = []
        for batch in file.iter_batches(_BATCH):
            columns = [map(_as_text, column.to_pylist()) for column in batch.columns]
            rows += ([known.setdefault(cell, cell) for cell in cells] for cells in zip(*columns, strict=True))
    return names, dict(enumerate(rows, 1))


def _check_values(metadata: Any, size: int) -> None:
    """Raises ValueError for a Parquet file of so many bytes that takes far more memory: equal values take no space.

    Names of images differ, so that the rows of a table take some, however well they are compressed.
    """
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    chunks = [[group.column(i) for group in groups] for i in range(metadata.num_columns)]
    values = [sum(chunk.num_values for chunk in each) for each in chunks]
    stated = sum(chunk.total_uncompressed_size for each in chunks for chunk in each)
    if max(values, default=0) > _FEW + min(8 * stated, 64 * size) or sum(values) > _MOST:
        raise ValueError(f"it has {sum(values):,} values in {size:,} bytes, which no table of images has")


def _as_text(cell: object) -> str:
    """A cell as one line, or a list of labels or captions with a line for each."""
    if isinstance(cell, list | tuple | set | np.ndarray):
        return "\n".join(map(_as_text, cell))
    return "" if cell is None else " ".join(str(cell).splitlines()).strip()


def _labels(cell: str) -> str:
    """A list of labels as they are separated in a text file."""
    return cell.replace("\n", "|")
