"""Predictions for image files: which files, and as a table, CSV or JSON lines, written as they come."""

from __future__ import annotations

import csv
import glob
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Literal, TextIO

from vitrail.data.folder import images_below, is_image
from vitrail.errors import UserError
from vitrail.progress import log
from vitrail.runs.predictor import Prediction
from vitrail.tasks.task import Answer

Format = Literal["table", "csv", "json"]


def listed(images: Sequence[str | Path]) -> Iterator[str]:
    """The image files in files, folders and globs, in their order; a UserError at once if one of them holds none."""
    if not images:
        raise UserError("There are no images: give image files, folders or globs.")
    sources = [str(source) for source in images]
    for source in sources:
        if next(find(source), None) is None:
            raise UserError(_nothing(source))
    return chain.from_iterable(map(find, sources))


def find(source: str) -> Iterator[str]:
    """The image files that a path or a glob (*, ?, **) stands for; a file that is named is taken as it is."""
    if Path(source).is_dir():
        yield from map(str, images_below(source, _left_out))
    elif Path(source).exists():
        yield source
    else:
        pattern = source.replace("[", "[[]")  # brackets are more often part of a name than a pattern
        for match in sorted(glob.iglob(pattern, recursive=True)):  # noqa: PTH207  # Path globs no absolute paths
            if not Path(match).is_dir():
                yield from [match] if is_image(match) else []
            elif "**" not in source:  # ** finds by itself what is in a folder
                yield from map(str, images_below(match, _left_out))


def _left_out(error: OSError) -> None:
    log.warning("%s cannot be read and is left out: %s.", error.filename, error.strerror)


def _nothing(source: str) -> str:
    if Path(source).is_dir():
        return f"The folder {source} holds no image, nor does any folder in it."
    if "*" in source or "?" in source:
        return f"No image matches {source}. Only names that end like images do are matched: .jpg, .png, .webp, …"
    return f"There is no file or folder {source}."


def write(predictions: Iterable[Prediction], format: Format, stream: TextIO) -> int:
    """Writes predictions as they come and returns the number of files that could not be read."""
    failures = 0

    def counted() -> Iterator[Prediction]:
        nonlocal failures
        for prediction in predictions:
            failures += prediction.error is not None
            yield prediction
            stream.flush()

    {"table": _write_table, "csv": _write_csv, "json": _write_json}[format](counted(), stream)
    return failures


def _write_table(predictions: Iterator[Prediction], stream: TextIO, block: int = 32) -> None:
    """For people: columns are aligned within a block of lines, so that the first lines are shown at once."""
    widths = [0, 1]
    while lines := list(islice(predictions, block)):
        widths[0] = max(widths[0], *(len(p.file) for p in lines))
        widths[1] = max(widths[1], *(len(p.labels[0]) for p in lines if p.labels), 1)
        for p in lines:
            text = f"— unreadable: {p.error}" if p.error is not None else p.answer.text(width=widths[1])
            stream.write(f"{p.file.ljust(widths[0])}  {text}\n")


def _write_csv(predictions: Iterator[Prediction], stream: TextIO) -> None:
    """The first file that could be read determines the columns, so failures before it have to wait."""
    first: list[Prediction] = []
    for p in predictions:
        first.append(p)
        if p.error is None:
            break
    columns = first[-1].answer.columns() if first else Answer().columns()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["file", *columns, "error"])
    for p in chain(first, predictions):
        cells = [] if p.error is not None else p.answer.cells()
        writer.writerow([p.file, *cells, *[""] * (len(columns) - len(cells)), p.error or ""])


def _write_json(predictions: Iterator[Prediction], stream: TextIO) -> None:
    for p in predictions:
        stream.write(json.dumps({"file": p.file, **p.answer.to_json(), "error": p.error}) + "\n")
