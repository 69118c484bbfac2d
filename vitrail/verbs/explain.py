"""`vitrail explain`: figures of a model's attention, relevance and features."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from vitrail.config import InputConfig, Size, coerce
from vitrail.errors import UserError

if TYPE_CHECKING:
    from vitrail.data import Source
    from vitrail.data.image_like import ImageLike
    from vitrail.explain.explanation import Explanation

Format = Literal["png", "svg", "pdf"]


def explain(
    run: str | PathLike[str],
    images: Sequence[str | Path] | ImageLike | Iterable[ImageLike] = (),
    *,
    data: str | Path | Source | None = None,
    out: str | Path | None = None,
    patch: str | tuple[int, int] | None = None,
    labels: str | Sequence[str] | None = None,
    target: str | None = None,
    instead: str | None = None,
    format: Format = "png",
    save_data: bool = False,
    batch_size: int = 32,
    workers: int = 2,
    device: str | None = None,
    seed: int = 0,
    img_size: str | int | Size | None = None,
    pictures: int | None = None,
) -> Explanation:
    """Draw what a model sees: attention, relevance, position embeddings, filters, neighbours, mistakes.

    Figures that do not apply to the model are listed with the reason. Without images, or with --data, there are also an
    embedding map of the data set and its worst and least certain predictions.

    Args:
        run: run folder or weights file
        images: image files, folders or globs (default: some validation images of the run's own data)
        data: data set for the map, galleries and neighbours (default: the run's own, unless images are given)
        out (FOLDER): folder for the figures (default: RUN/explain)
        patch (ROW,COL): also draw the attention of this patch, counted from 0
        labels (TEXT[,…]): words to explain, of a model trained on captions: "cat,dog"
        target (CLASS): class to explain (default: the predicted one)
        instead (CLASS): class to contrast it with (default: none; the runner-up is drawn beside it)
        format: file format of the figures
        save_data: save the arrays behind each figure as .npz
        batch_size: images per forward pass
        workers: threads that read images
        device: cpu, cuda, cuda:1 or mps (default: the fastest available)
        seed: random seed of the choice of validation images
        pictures: most images to draw, up to 256 (default: 24, a sheet per kind of figure)
        img_size (H[xW]): resize images to this; position embeddings are resampled (default: the model's size)
    """
    from vitrail.device import choose_device
    from vitrail.explain.explanation import draw
    from vitrail.explain.subject import open_subject
    from vitrail.runs.run import Run

    if min(batch_size, workers) < 1:
        raise UserError(f"'batch_size' and 'workers' must be at least 1, but they are {batch_size} and {workers}.")
    if format not in get_args(Format):
        raise UserError(f"'format' must be one of {', '.join(get_args(Format))}, but it is '{format}'.")
    run = run if isinstance(run, str) else Path(run)
    subject = open_subject(
        run,
        images,
        data=data,
        patch=_parse_patch(patch) if isinstance(patch, str) else patch,
        labels=labels,
        target=target,
        instead=instead,
        batch_size=batch_size,
        workers=workers,
        device=choose_device(device),
        seed=seed,
        img_size=None if img_size is None else coerce(InputConfig, "img_size", img_size),
        most=pictures,
    )
    folder = Run.of(run).explain_folder if out is None else Path(out)
    return draw(subject, folder, format, save_data)


def show(explanation: Explanation) -> int:
    """Print the paths of the figures, and why others are missing."""
    for file, error in explanation.unreadable:
        print(f"{file}  — unreadable: {error}")
    print(*explanation.files, *explanation.notes, sep="\n")
    return 1 if explanation.unreadable else 0


def _parse_patch(text: str) -> tuple[int, int]:
    """The row and column of a patch, from "3,4"."""
    match = re.fullmatch(r"\s*(\d+)\s*,\s*(\d+)\s*", text)
    if match is None:
        raise UserError(f"'patch' must be a row and a column counted from 0, such as 3,4, but it is '{text}'.")
    return int(match[1]), int(match[2])
