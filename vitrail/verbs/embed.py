"""`vitrail embed`: feature vectors of images."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.errors import UserError
from vitrail.runs import EngineName
from vitrail.world import World, world

if TYPE_CHECKING:
    from vitrail.data.image_like import ImageLike
    from vitrail.evaluate.embed import Embedding


def embed(
    run: str | PathLike[str],
    images: Sequence[str | Path] | ImageLike | Iterable[ImageLike],
    *,
    batch_size: int = 32,
    workers: int = 2,
    device: str | None = None,
    engine: EngineName = "auto",
) -> Iterator[Embedding]:
    """Compute the feature vectors of images, the input of the model's head.

    Vectors are returned one by one, in the order of the images; under torchrun, each process has some of them, and
    FILE.parquet becomes a folder with one file of each process. A path without images is an error. An unreadable file
    gives an embedding with an error; the command then exits with 1.

    Args:
        run: run folder or weights file
        images: image files, folders or globs
        batch_size: images per forward pass
        workers: threads that read images
        device: cpu, cuda, cuda:1 or mps (default: the fastest available)
        engine: program that computes the model on a CPU; auto tests in a long job which is the fastest
    """
    from vitrail.device import choose_device
    from vitrail.evaluate.embed import embeddings
    from vitrail.evaluate.predict import listed
    from vitrail.runs.engine import check_engine
    from vitrail.runs.predictor import Predictor
    from vitrail.weights import open_run

    if min(batch_size, workers) < 1:
        raise UserError(f"'batch_size' and 'workers' must be at least 1, but they are {batch_size} and {workers}.")
    together, files = World.join(), listed(images)
    if together.size > 1:
        files = iter(together.part([*files]))
    run = run if isinstance(run, str) else Path(run)
    device = choose_device(device)
    check_engine(engine, device)  # before the weights are read
    predictor = Predictor.of(*open_run(run, device, headless=True), device, engine)
    return embeddings(predictor, files, batch_size, workers)


def show(embeddings: Iterator[Embedding], *, out: str) -> int:
    """Write the vectors to a file.

    Args:
        out (FILE): .npz or .parquet file to write
    """
    from vitrail.evaluate.embed import write

    written = write(embeddings, out)
    if not world().first():
        return 0
    for file, error in written.unreadable:
        print(f"{file}  — unreadable: {error}")
    print(f"{written.images:,} vectors of length {written.width:,} are in {out}")
    return 1 if written.unreadable else 0
