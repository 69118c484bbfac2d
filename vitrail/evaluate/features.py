"""Outputs and feature vectors of every image of a split, computed once and kept in the run.

There is a file for each data set and split, with a key that changes with the weights, the images and the
preprocessing. Where the key differs, the values are computed anew and the file is replaced, so a run never holds more
than the latest values of each split.
"""

from __future__ import annotations

import hashlib
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from vitrail.data.cache import once
from vitrail.data.dataset import ArraySplit, FileSplit, MappedSplit, PackedSplit, Split
from vitrail.data.preprocess import Preprocess
from vitrail.evaluate.stream import Keep, run_split, stream
from vitrail.models import Model
from vitrail.progress import log
from vitrail.runs.predictor import Predictor

Vectors = NDArray[np.float32]

_VERSION = 1  # to be raised when images are read or resized, or models compute, in another way
_ROWS = 1024  # images of an array that are hashed at a time
_MOST = 2**30  # bytes of values that are kept


def split_features(
    model: Model,
    split: Split,
    preprocess: Preprocess,
    file: Path,
    *,
    batch_size: int = 256,
    workers: int = 2,
    device: str = "cpu",
) -> Vectors:
    """The feature vectors of a split, (N, D): those kept in `file` if nothing has changed since, else new ones."""

    def compute() -> Vectors:
        title = f"features of {file.stem}"
        features, _ = run_split(
            model,
            split,
            preprocess,
            compute=model.embed,
            batch_size=batch_size,
            workers=workers,
            device=device,
            title=title,
        )
        return features

    return _once(file, "features", _key(model, split, preprocess), compute)


def split_outputs(
    predictor: Predictor,
    split: Split,
    file: Path,
    *,
    keep: bool = True,
    cache_gb: float = 0.0,
    batch_size: int = 256,
    workers: int = 2,
    device: str = "cpu",
    title: str = "evaluating",
) -> Vectors:
    """The outputs for a split, (N, K): those kept in `file` if nothing has changed since, else new ones.

    With `keep`, new ones are written to the file. With `cache_gb`, decoded images are cached as in training.
    """
    preprocess, version = predictor.card.preprocess, _version(split)

    def compute() -> Vectors:
        ready = once(split, preprocess, False, cache_gb, workers) if cache_gb else split
        kept = Keep()
        stream(
            predictor.tensor_outputs,
            ready,
            preprocess,
            kept,
            batch_size=batch_size,
            workers=workers,
            device=device,
            title=title,
        )
        return kept.outputs

    key = None if version is None else _digest(repr((_VERSION, predictor.fingerprint, preprocess, version))).hexdigest()
    return _once(file, "outputs", key, compute, keep)


def _once(file: Path, name: str, key: str | None, compute: Callable[[], Vectors], keep: bool = True) -> Vectors:
    """The values of this name and key in a file, or computed ones. Without a key, nothing is kept."""
    if key is not None and (kept := _kept(file, key, name)) is not None:
        return kept
    values = compute()
    if keep and key is not None and values.nbytes <= _MOST:
        _keep(file, key, name, values)
    return values


def _digest(text: str) -> hashlib.blake2b:
    return hashlib.blake2b(text.encode(), digest_size=16)


def _key(model: Model, split: Split, preprocess: Preprocess) -> str | None:
    """Changes with everything that features depend on; None if the images may change unnoticed."""
    version = _version(split)
    if version is None:
        return None
    digest = _digest(repr((_VERSION, model.config, preprocess, version)))
    for name, value in model.state_dict().items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _version(split: Split) -> str | None:
    if isinstance(split, FileSplit | PackedSplit):
        return split.version()
    if not isinstance(split, ArraySplit | MappedSplit):  # a stream
        return None
    digest = _digest(f"{split.pixels.dtype} {split.pixels.shape[1:]}")
    for at in range(0, len(split), _ROWS):
        rows = np.arange(at, min(at + _ROWS, len(split)))
        digest.update(np.ascontiguousarray(split.take(rows)).data)
    return digest.hexdigest()


def _kept(file: Path, key: str, name: str) -> Vectors | None:
    """The values in a file, if it is intact and has this key."""
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            if arrays["key"].item() == key:
                values: Vectors = arrays[name]
                return values
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        pass  # there is none, or it is damaged: it is made anew
    return None


def _keep(file: Path, key: str, name: str, values: Vectors) -> None:
    """Writes to a temporary file and renames it, so that two programs at once do not interfere."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent, prefix=".unfinished-") as folder:
            unfinished = Path(folder) / file.name
            arrays = {name: values}
            np.savez(unfinished, key=key, **arrays)  # type: ignore[arg-type,unused-ignore]
            unfinished.replace(file)
    except OSError as error:
        log.warning("The %s are not kept: %s cannot be written (%s).", name, file, error.strerror)
