"""Draws all figures of a subject into a folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.charts.style import save
from vitrail.errors import UserError
from vitrail.explain.figures import FIGURES, Figures
from vitrail.explain.subject import Drawing, Subject
from vitrail.files import atomic_write
from vitrail.progress import track


@dataclass(frozen=True, eq=False)
class Explanation:
    """The figures written, their arrays, and why others are missing."""

    files: tuple[Path, ...]
    arrays: Mapping[str, Mapping[str, NDArray[Any]]]  # behind each figure, by file stem
    notes: tuple[str, ...]  # why a figure is missing, a sentence each
    unreadable: tuple[tuple[str, str], ...]  # file, reason


def draw(subject: Subject, folder: Path, format: str, save_data: bool) -> Explanation:
    """Draws every figure that applies to the model into a folder; `save_data` also writes the arrays as .npz."""
    files: list[Path] = []
    arrays: dict[str, Mapping[str, NDArray[Any]]] = {}
    notes: list[str] = []
    for kind in track(FIGURES, "explaining", len(FIGURES), "kinds of figures"):
        for drawing in _drawings(kind, subject, notes):
            files += _write(drawing, folder, format, save_data)
            arrays[drawing.name] = drawing.arrays
    if subject.left_out:
        shown, every = len(subject.pictures), len(subject.pictures) + subject.left_out
        notes.append(f"Drawn for {shown} of {every} images, a sheet per kind. --pictures {every} draws them all.")
    once = tuple(dict.fromkeys(notes))  # several figures may be missing for one reason
    return Explanation(tuple(files), arrays, once, tuple(subject.unreadable))


def _drawings(kind: Figures, subject: Subject, notes: list[str]) -> Iterator[Drawing]:
    try:
        yield from kind(subject)
    except UserError as error:
        notes.append(str(error))


def _write(drawing: Drawing, folder: Path, format: str, save_data: bool) -> list[Path]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"The folder {folder} cannot be created: {error.strerror}. Choose another --out.") from error
    path = folder / f"{drawing.name}.{format}"
    with atomic_write(path) as temporary:
        save(drawing.figure, temporary, format)
    if not save_data:
        return [path]
    data = path.with_suffix(".npz")
    with atomic_write(data) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **drawing.arrays)  # type: ignore[arg-type,unused-ignore]
    return [path, data]
