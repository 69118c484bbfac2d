"""`vitrail search`: finds pictures by a sentence or by another picture."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.errors import UserError
from vitrail.runs import EngineName

if TYPE_CHECKING:
    from vitrail.data.image_like import ImageLike
    from vitrail.runs.predictor import Predictor
    from vitrail.runs.words import Hit


def search(
    run: str | PathLike[str],
    images: Sequence[str | Path] | ImageLike | Iterable[ImageLike],
    query: str | ImageLike,
    *,
    top: int = 10,
    index: str | Path | None = None,
    batch_size: int = 32,
    workers: int = 2,
    device: str | None = None,
    engine: EngineName = "auto",
) -> list[Hit]:
    """Find the pictures that match a sentence, or that are most like another picture.

    A sentence needs a model trained on images with captions; any model compares pictures. With --index the images are
    read once: later searches read only new and changed ones.

    Args:
        run: run folder, weights file or exported file
        images: image files, folders or globs to search
        query: what to find: a sentence in quotation marks, or an image file
        top: number of pictures to find
        index (FILE): .npz file that keeps the vectors of the images (default: none)
        batch_size: images per forward pass
        workers: threads that read images
        device: cpu, cuda, cuda:1 or mps (default: the fastest available)
        engine: program that computes the model on a CPU; auto tests in a long job which is the fastest
    """
    from vitrail.data.folder import is_image
    from vitrail.evaluate.predict import listed
    from vitrail.runs.words import Finder

    for name, value in (("top", top), ("batch_size", batch_size), ("workers", workers)):
        if value < 1:
            raise UserError(f"'{name}' must be at least 1, but it is {value}.")
    file = None if index is None else Path(index)
    if file is not None and file.suffix != ".npz":
        raise UserError(f"--index must be an .npz file, but it is {file}.")
    files, run = listed(images), run if isinstance(run, str) else Path(run)
    finder = Finder(_opened(run, device, engine), batch_size, workers)
    # The query first: a mistake in it is reported before all images are read.
    if isinstance(query, str) and is_image(query) and not os.path.isfile(query):  # noqa: PTH113
        raise UserError(f"The picture {query} does not exist. Give a sentence or an image file.")
    words = isinstance(query, str) and not os.path.isfile(query)  # noqa: PTH113  # Path raises for long sentences
    wanted = finder.sentence(str(query)) if words else finder.picture(query)
    return finder.index(files, file).nearest(wanted, top)


def _opened(run: str | Path, device: str | None, engine: EngineName) -> Predictor:
    """An exported file, which needs no torch, or a run or weights file, with or without a head."""
    from vitrail.runs.exported import is_exported
    from vitrail.runs.predictor import Predictor

    if is_exported(run):
        return Predictor(run, device, engine=engine)
    from vitrail.device import choose_device
    from vitrail.runs.engine import check_engine
    from vitrail.weights import open_run

    device = choose_device(device)
    check_engine(engine, device)  # before the weights are read
    return Predictor.of(*open_run(run, device, headless=True), device, engine)


def show(hits: list[Hit], *, json: bool = False) -> int:
    """Print the pictures, best match first.

    Args:
        json: print JSON
    """
    import json as as_json

    if json:
        print(as_json.dumps([{"file": hit.file, "similarity": round(hit.similarity, 6)} for hit in hits], indent=2))
    else:
        for hit in hits:
            print(f"{hit.similarity:6.3f}  {hit.file}")
    return 0
