"""`explain`: everything that can be drawn of a model and its pictures, written to a folder."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from vitrail.charts.figures import save
from vitrail.config import Size
from vitrail.device import choose_device
from vitrail.errors import UserError
from vitrail.explain import data_drawings, drawings, relative_drawings
from vitrail.explain.subject import Drawing, Subject, open_subject
from vitrail.files import atomic_write
from vitrail.progress import track
from vitrail.weights import home

Format = Literal["png", "svg", "pdf"]

# What is drawn, in this order. Each gives figures, or a UserError with the reason why a model has none.
FIGURES: tuple[Callable[[Subject], Iterator[Drawing]], ...] = (
    drawings.rollouts,
    drawings.relevances,
    drawings.heads,
    drawings.patches,
    drawings.windows,
    drawings.distance,
    drawings.positions,
    relative_drawings.mixing,
    drawings.filters,
    data_drawings.embedding,
    data_drawings.nearest,
    data_drawings.wrong,
    data_drawings.uncertain,
)


@dataclass(frozen=True, eq=False)
class Explanation:
    """What was written, and what was not."""

    files: tuple[Path, ...]
    arrays: Mapping[str, Mapping[str, NDArray[Any]]]  # what each figure shows, by the name of its file
    notes: tuple[str, ...]  # a sentence for each figure that makes no sense for this model
    unreadable: tuple[tuple[str, str], ...]  # file, reason


def explain(
    run: str | Path,
    images: Sequence[str | Path] = (),
    *,
    data: str | Path | None = None,
    out: str | Path | None = None,
    patch: tuple[int, int] | None = None,
    target: str | None = None,
    instead: str | None = None,
    format: Format = "png",
    save_data: bool = False,
    batch_size: int = 32,
    workers: int = 2,
    device: str | None = None,
    seed: int = 0,
    img_size: int | Size | None = None,
) -> Explanation:
    """Draws what a model sees in images of files, folders and globs, or else in some of its own validation images.

    Without images, and of any `data` that is given, there are a map of the whole, the most wrong and the least certain
    predictions, and neighbours: of the images that are given, or of those that are most wrong. `target` is the class
    that is explained, by default the one that the model says, and `instead` the one that it is set against.

    Figures go to `out`, by default `explain` in the run, and with `save_data` the arrays that they show lie beside
    them. With `patch`, its row and column, there is a figure of what that patch attends to.
    With `img_size` the model reads images of another size than it was trained on, with its positions resampled.
    """
    if min(batch_size, workers) < 1:
        raise UserError(f"batch_size and workers must be at least 1, but they are {batch_size} and {workers}.")
    if format not in get_args(Format):
        raise UserError(f"Figures are written as {', '.join(get_args(Format))}, but 'format' is '{format}'.")
    device = choose_device(device)
    subject = open_subject(
        run,
        images,
        data=data,
        patch=patch,
        target=target,
        instead=instead,
        batch_size=batch_size,
        workers=workers,
        device=device,
        seed=seed,
        img_size=img_size,
    )
    folder = home(run) / "explain" if out is None else Path(out)
    files: list[Path] = []
    arrays: dict[str, Mapping[str, NDArray[Any]]] = {}
    notes: list[str] = []
    for drawing in track(_draw(subject, notes), "explaining", unit="figure"):
        files += _write(drawing, folder, format, save_data)
        arrays[drawing.name] = drawing.arrays
    once = tuple(dict.fromkeys(notes))  # what a model lacks may concern several figures
    return Explanation(tuple(files), arrays, once, tuple(subject.unreadable))


def parse_patch(text: str) -> tuple[int, int]:
    """The row and column of a patch, from "3,4"."""
    match = re.fullmatch(r"\s*(\d+)\s*,\s*(\d+)\s*", text)
    if match is None:
        raise UserError(f"A patch is given by its row and column, counted from 0, such as 3,4; got '{text}'.")
    return int(match[1]), int(match[2])


def _draw(subject: Subject, notes: list[str]) -> Iterator[Drawing]:
    for draw in FIGURES:
        try:
            yield from draw(subject)
        except UserError as error:  # noqa: PERF203  # is rare
            notes.append(str(error))


def _write(drawing: Drawing, folder: Path, format: Format, save_data: bool) -> list[Path]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"The folder {folder} cannot be made: {error.strerror}. Choose another with --out.") from error
    path = folder / f"{drawing.name}.{format}"
    with atomic_write(path) as temporary:
        save(drawing.figure, temporary, format)
    if not save_data:
        return [path]
    data = path.with_suffix(".npz")
    with atomic_write(data) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **drawing.arrays)  # type: ignore[arg-type,unused-ignore]
    return [path, data]
