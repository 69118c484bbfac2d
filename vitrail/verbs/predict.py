"""`vitrail predict`: predictions for images."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vitrail.errors import UserError
from vitrail.runs import EngineName
from vitrail.world import World, world

if TYPE_CHECKING:
    from vitrail.data.image_like import ImageLike
    from vitrail.runs.predictor import Prediction


def predict(
    run: str | PathLike[str],
    images: Sequence[str | Path] | ImageLike | Iterable[ImageLike],
    *,
    labels: str | Sequence[str] | None = None,
    templates: Sequence[str] | None = None,
    top: int | None = None,
    threshold: float | None = None,
    max_pixels: int | None = None,
    windows: bool = False,
    batch_size: int = 32,
    workers: int = 2,
    device: str | None = None,
    engine: EngineName = "auto",
) -> Iterator[Prediction]:
    """Predict the classes, labels or values of images.

    Predictions are returned one by one, in the order of the images. A missing or unreadable file gives a prediction
    with an error; the command then exits with 1.

    Args:
        run: run folder or weights file
        images: image files, folders, globs or web addresses; - reads one image from standard input
        labels (TEXT[,…]): classify by these words, with a model trained on captions: "cat,dog,a photo of a bird"
        templates: texts to put each label into, averaged: "a photo of a {}." (default: the label alone)
        top: predictions per image (default: 5; multi-label: all above their thresholds)
        threshold: smallest probability of a prediction (default: 0; multi-label: those of the model)
        max_pixels: pixels of the largest image to read (default: 178956970)
        windows: predict masks of large pictures at their own scale, in overlapping windows of the model's size
        batch_size: images per forward pass
        workers: threads that read images
        device: cpu, cuda, cuda:1 or mps (default: the fastest available)
        engine: program that computes the model on a CPU; auto tests in a long job which is the fastest
    """
    from vitrail.data.images import allow_pixels
    from vitrail.evaluate.predict import listed, together
    from vitrail.runs.predictor import Predictor
    from vitrail.runs.words import classify_by, label_names, warn_of_cut

    for name, value in (("top", top), ("batch_size", batch_size), ("workers", workers)):
        if value is not None and value < 1:
            raise UserError(f"'{name}' must be at least 1, but it is {value}.")
    if threshold is not None and not 0 <= threshold <= 1:
        raise UserError(f"'threshold' must be a probability from 0 to 1, but it is {threshold:g}.")
    if max_pixels is not None:
        allow_pixels(max_pixels)
    World.join()
    files = listed(images)
    names = None if labels is None else label_names(labels)
    if templates and names is None:
        raise UserError("--templates needs labels to put into them. Add --labels.")
    predictor = Predictor(run if isinstance(run, str) else Path(run), device, engine=engine)
    if names is not None:
        made = templates or ("{}",)
        warn_of_cut(predictor.card, names, made)
        predictor = classify_by(predictor, names, made)
    elif predictor.card.task.several:
        raise UserError(f'{run} has no classes of its own. Give words to choose from: --labels "cat,dog".')
    task = predictor.card.task
    if top is not None and task.annotated:
        raise UserError(f"--top is for classes and labels, but a {task.title} model shows all it finds. Remove it.")
    if threshold is not None and task.meant == "values":
        raise UserError(f"--threshold needs probabilities, but a {task.title} model predicts {task.meant}.")
    how: dict[str, Any] = {"batch_size": batch_size, "workers": workers, "windows": windows}
    return together(lambda mine: predictor(mine, top, threshold=threshold, **how), files, batch_size)


def show(
    predictions: Iterator[Prediction],
    *,
    images: Sequence[str],
    format: Literal["table", "csv", "json", "coco"] | None = None,
    out: str | Path | None = None,
    pictures: str | Path | None = None,
) -> int:
    """Print each prediction as it comes, or write it to a file.

    Args:
        format: output format; json has one object per line, coco is for boxes (default: table, or --out's suffix)
        out (FILE): .csv, .json, .jsonl or .txt file to write the predictions to (default: printed)
        pictures (FOLDER): folder for masks as PNG files, and for the images with masks or boxes over them
    """
    from vitrail.evaluate.predict import listed, write, write_file

    if not world().first():
        return len([*predictions])  # none, once the first process has those of this one
    if pictures is not None:
        from vitrail.evaluate.pictures import with_pictures

        predictions = with_pictures(predictions, Path(pictures), listed(images))
    if out is None:
        return 1 if write(predictions, format or "table", sys.stdout) else 0
    return 1 if write_file(predictions, format, Path(out)) else 0
