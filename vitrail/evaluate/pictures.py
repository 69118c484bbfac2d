"""Pictures of answers: masks and boxes as files, and laid over their images."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from vitrail.data.images import read_image
from vitrail.data.pixels import UnreadableImage, to_pil
from vitrail.errors import UserError
from vitrail.files import atomic_write, check_writable
from vitrail.runs.predictor import Prediction

OVERLAY = "_overlay.jpg"  # the suffix of an image with its answer
_LONGEST_NAME = 200  # bytes, so that a file system has room for suffixes


def with_pictures(predictions: Iterable[Prediction], folder: Path, files: Iterable[object]) -> Iterator[Prediction]:
    """Yields predictions as they come, and writes the files of each answer and its image with the answer over it.

    Raises UserError immediately if the folder has images to predict: they might be replaced, and the next command would
    take the pictures for images.
    """
    check_writable(folder)
    for file in (Path(file) for file in files if isinstance(file, str | Path)):
        if folder.resolve() in (file.absolute().parent.resolve(), file.resolve().parent):
            raise UserError(
                f"--pictures must not be a folder of images to predict, but {file} is in it. Choose another."
            )
    return _writing(predictions, folder)


def _writing(predictions: Iterable[Prediction], folder: Path) -> Iterator[Prediction]:
    taken: set[str] = set()
    for prediction in predictions:
        if prediction.error is None:
            _write(prediction, folder, taken)
        yield prediction


def _write(prediction: Prediction, folder: Path, taken: set[str]) -> None:
    layer = prediction.answer.layer()
    if layer is None:
        raise UserError("--pictures is for masks and boxes, but this model answers without a picture. Remove it.")
    try:
        folder.mkdir(parents=True, exist_ok=True)  # not before: a refused command leaves no folder
    except OSError as error:
        raise UserError(f"The folder {folder} cannot be created: {error.strerror}. Choose another.") from error
    stem = os.fsdecode(os.fsencode(Path(prediction.file).stem)[:_LONGEST_NAME])
    name, number = stem, 1
    while name in taken:
        number += 1
        name = f"{stem}-{number}"
    taken.add(name)
    try:
        image = to_pil(read_image(prediction.file)).convert("RGBA")
    except (UnreadableImage, OSError):
        image = None  # it was not a file
    files = {folder / f"{name}{suffix}": content for suffix, content in prediction.answer.files().items()}
    if image is not None:
        overlay = folder / f"{name}{OVERLAY}"
        for file in files:
            if file.exists() and not overlay.exists():
                raise UserError(
                    f"{file} was not written by --pictures, because {overlay.name} is not beside it, so it is not "
                    "replaced. Choose another folder."
                )
        image.alpha_composite(layer)
        with atomic_write(overlay) as path:  # first: it marks the others as ours
            image.convert("RGB").save(path, "JPEG", quality=92)
    for file, content in files.items():
        with atomic_write(file) as path:
            path.write_bytes(content)
