"""Image files for prediction, and predictions as a table, CSV or JSON lines, streamed."""

from __future__ import annotations

import csv
import glob
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import chain, islice
from pathlib import Path
from typing import Literal, TextIO

from vitrail.data.folder import images_below, is_image
from vitrail.data.image_like import ImageLike, one_or_many
from vitrail.data.remote import is_remote
from vitrail.errors import UserError
from vitrail.files import atomic_write
from vitrail.progress import log, track
from vitrail.runs.predictor import Prediction
from vitrail.tasks.task import Answer
from vitrail.world import world

Format = Literal["table", "csv", "json", "coco"]


def listed(images: ImageLike | Iterable[ImageLike]) -> Iterator[ImageLike]:
    """The images of paths, folders and globs, web addresses, `-` and Python objects, in order.

    Raises UserError immediately if there is none in a list. A path without images among others is listed as it is, to
    be reported like an unreadable file.
    """
    sources = one_or_many(images)
    if isinstance(sources, Sequence):
        if not sources:
            raise UserError("No images were given. Give image files, folders or globs.")
        if all(isinstance(source, str | Path) and next(find(str(source)), None) is None for source in sources):
            raise UserError(_nothing(str(sources[0])))
    return chain.from_iterable(map(_expanded, sources))


def _expanded(source: ImageLike) -> Iterator[ImageLike]:
    """The image files of a path, or the path itself if there are none; any other image as it is."""
    if not isinstance(source, str | Path):
        yield source
        return
    files = find(str(source))
    yield from chain([next(files, source)], files)


def find(source: str) -> Iterator[str]:
    """The image files of a path or glob (*, ?, **); an explicit file may have any extension."""
    if is_remote(source):
        yield source
    elif Path(source).is_dir():
        yield from map(str, images_below(source, _left_out))
    elif Path(source).exists():
        yield source
    else:
        pattern = source.replace("[", "[[]")  # brackets are more often part of a name
        for match in sorted(glob.iglob(pattern, recursive=True)):  # noqa: PTH207  # Path does not glob absolute paths
            if not Path(match).is_dir():
                yield from [match] if is_image(match) else []
            elif "**" not in source:  # ** descends by itself
                yield from map(str, images_below(match, _left_out))


def _left_out(error: OSError) -> None:
    log.warning("%s cannot be read and is left out: %s.", error.filename, error.strerror)


def _nothing(source: str) -> str:
    if Path(source).is_dir():
        return f"The folder {source} and its subfolders contain no images."
    if "*" in source or "?" in source:
        return f"No image matches {source}. Globs match image extensions only: .jpg, .png, .webp, …"
    return f"{source} does not exist."


def together(
    predict: Callable[[Iterator[ImageLike]], Iterator[Prediction]], images: Iterator[ImageLike], batch_size: int
) -> Iterator[Prediction]:
    """The predictions for images, in order, which processes share batch by batch; the first process has all of them."""
    if world().size == 1:
        yield from predict(images)
        return
    mine = (image for i, image in enumerate(images) if i // batch_size % world().size == world().rank)
    answers = predict(mine)
    while any(batches := world().every([*islice(answers, batch_size)])):
        if world().first():
            yield from chain.from_iterable(batches)


def write(predictions: Iterable[Prediction], format: Format, stream: TextIO) -> int:
    """Writes predictions as they arrive; returns the number of unreadable files."""
    failures = 0

    def counted() -> Iterator[Prediction]:
        nonlocal failures
        for prediction in predictions:
            failures += prediction.error is not None
            yield prediction
            stream.flush()

    {"table": _write_table, "csv": _write_csv, "json": _write_json, "coco": _write_coco}[format](counted(), stream)
    return failures


_SUFFIXES: dict[str, Format] = {".csv": "csv", ".json": "json", ".jsonl": "json", ".txt": "table"}


def write_file(predictions: Iterable[Prediction], format: Format | None, path: Path) -> int:
    """Writes predictions to a file, by default in the format of its suffix; returns the number of unreadable files.

    The file is there once all predictions are: a command that is stopped leaves the old one, or none.
    """
    if format is None and path.suffix.lower() not in _SUFFIXES:
        raise UserError(f"--out must be a {', '.join(_SUFFIXES)} file, but it is {path}. Or set --format.")
    known = _SUFFIXES.get(path.suffix.lower())
    if format is not None and known not in (None, format) and not (format == "coco" and known == "json"):
        raise UserError(f"--out {path} is a file of --format {known}, but --format is {format}. Change one of them.")
    direct = path.exists() and not path.is_file()  # a device or a pipe, which must not be replaced
    try:
        with (
            nullcontext(path) if direct else atomic_write(path) as place,
            # File names may be undecodable.
            place.open("w", encoding="utf-8", errors="backslashreplace", newline="") as stream,
        ):
            return write(track(predictions, "predicting", unit="img"), format or _SUFFIXES[path.suffix.lower()], stream)
    except OSError as error:
        raise UserError(f"Could not write {path}: {error.strerror}. Choose another --out.") from error


def _write_table(predictions: Iterator[Prediction], stream: TextIO, block: int = 32) -> None:
    """Columns are aligned within blocks of lines, so that the first lines appear early."""
    widths = [0, 1]
    while lines := list(islice(predictions, block)):
        widths[0] = max(widths[0], *(len(p.file) for p in lines))
        widths[1] = max(widths[1], *(len(p.labels[0]) for p in lines if p.labels), 1)
        for p in lines:
            text = f"— unreadable: {p.error}" if p.error is not None else p.answer.text(width=widths[1])
            stream.write(f"{p.file.ljust(widths[0])}  {text}\n")


def _write_csv(predictions: Iterator[Prediction], stream: TextIO) -> None:
    """The first readable file determines the columns, so earlier failures are written after it."""
    first: list[Prediction] = []
    for p in predictions:
        first.append(p)
        if p.error is None:
            break
    columns = first[-1].answer.columns() if first else Answer().columns()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["file", *columns, "error"])
    for p in chain(first, predictions):
        for cells in [[]] if p.error is not None else p.answer.rows():
            writer.writerow([p.file, *cells, *[""] * (len(columns) - len(cells)), p.error or ""])


def _write_json(predictions: Iterator[Prediction], stream: TextIO) -> None:
    for p in predictions:
        stream.write(json.dumps({"file": p.file, **p.answer.to_json(), "error": p.error}) + "\n")


def _write_coco(predictions: Iterator[Prediction], stream: TextIO) -> None:
    """A list of objects, as pycocotools reads it; images are identified by their files, classes by their numbers."""
    listed = ({"image_id": p.file, **each} for p in predictions if p.error is None for each in p.answer.detections())
    stream.write("[" + ",\n ".join(map(json.dumps, listed)) + "]\n")
