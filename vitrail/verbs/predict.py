"""`vitrail predict`: predictions for images."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from vitrail.errors import UserError
from vitrail.runs import EngineName

if TYPE_CHECKING:
    from vitrail.data.image_like import ImageLike
    from vitrail.runs.predictor import Prediction


def predict(
    run: str | PathLike[str],
    images: Sequence[str | Path] | ImageLike | Iterable[ImageLike],
    *,
    top: int | None = None,
    batch_size: int = 32,
    workers: int = 2,
    device: str | None = None,
    engine: EngineName = "auto",
) -> Iterator[Prediction]:
    """Predict the classes, labels or values of images.

    Predictions are returned one by one, in the order of the images. A path without images is an error. An unreadable
    file gives a prediction with an error; the command then exits with 1.

    Args:
        run: run folder or weights file
        images: image files, folders or globs
        top: predictions per image (default: 5; multi-label: all above their thresholds)
        batch_size: images per forward pass
        workers: threads that read images
        device: cpu, cuda, cuda:1 or mps (default: the fastest available)
        engine: program that computes the model on a CPU; auto tests in a long job which is the fastest
    """
    from vitrail.evaluate.predict import listed
    from vitrail.runs.predictor import Predictor

    if min(1 if top is None else top, batch_size, workers) < 1:
        raise UserError(
            f"'top', 'batch_size' and 'workers' must be at least 1, but they are {top}, {batch_size} and {workers}."
        )
    files, run = listed(images), run if isinstance(run, str) else Path(run)
    return Predictor(run, device, engine=engine)(files, top, batch_size=batch_size, workers=workers)


def show(predictions: Iterator[Prediction], *, format: Literal["table", "csv", "json"] = "table") -> int:
    """Print each prediction as it comes.

    Args:
        format: output format; json is one object per line
    """
    from vitrail.evaluate.predict import write

    return 1 if write(predictions, format, sys.stdout) else 0
