"""What a model makes of every image of a split, in order; feature vectors are computed once and kept.

They are kept in the run, a file for each data set and split, with a key that changes with the weights, the images and
the preprocessing. Where the key is another, they are computed anew and the file is replaced, so that a run never holds
more than the last features of each split.
"""

from __future__ import annotations

import hashlib
import math
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.data.dataset import ArraySplit, FileSplit, MappedSplit, PackedSplit, Split
from vitrail.data.loader import batches
from vitrail.data.preprocess import Preprocess
from vitrail.device import Precision
from vitrail.models import Model
from vitrail.progress import log, track

_VERSION = 1  # of the features: to be raised when images are read or resized, or models compute, in another way
_ROWS = 1024  # images of an array that are hashed at a time


def run_split(
    model: Model,
    split: Split,
    preprocess: Preprocess,
    *,
    compute: Callable[[Tensor], Tensor] | None = None,
    batch_size: int = 256,
    workers: int = 2,
    device: str = "cpu",
    amp: Precision = "off",
    title: str = "evaluating",
) -> tuple[NDArray[np.float32], NDArray[Any]]:
    """What the model, or `compute`, a method of it, makes of every image of a split, in its order; and the targets."""
    compute = compute or model
    precision = torch.float16 if amp == "fp16" else torch.bfloat16
    autocast = torch.autocast(torch.device(device).type, precision, enabled=amp != "off")
    loader = track(batches(split, preprocess, batch_size, workers), title, math.ceil(len(split) / batch_size), "batch")
    outputs, labels = [], []
    training = model.training
    model.eval()
    try:
        with torch.inference_mode(), autocast:
            for images, targets in loader:
                outputs.append(compute(preprocess.normalise(images.to(device))).float().cpu().numpy())
                labels.append(targets.numpy())
    finally:
        model.train(training)
    return np.concatenate(outputs), np.concatenate(labels)


def split_features(
    model: Model,
    split: Split,
    preprocess: Preprocess,
    file: Path,
    *,
    batch_size: int = 256,
    workers: int = 2,
    device: str = "cpu",
) -> NDArray[np.float32]:
    """The feature vectors of a split, (N, D): those kept in `file` if nothing has changed since, else new ones."""
    key = _key(model, split, preprocess)
    if key is not None and (kept := _kept(file, key)) is not None:
        return kept
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
    if key is not None:
        _keep(file, key, features)
    return features


def _key(model: Model, split: Split, preprocess: Preprocess) -> str | None:
    """Changes with everything that features depend on; None if it cannot be told whether the images change."""
    version = _version(split)
    if version is None:
        return None
    digest = hashlib.blake2b(repr((_VERSION, model.config, preprocess, version)).encode(), digest_size=16)
    for name, value in model.state_dict().items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _version(split: Split) -> str | None:
    if isinstance(split, FileSplit | PackedSplit):
        return split.version()
    if not isinstance(split, ArraySplit | MappedSplit):  # a stream
        return None
    digest = hashlib.blake2b(f"{split.pixels.dtype} {split.pixels.shape[1:]}".encode(), digest_size=16)
    for at in range(0, len(split), _ROWS):
        rows = np.arange(at, min(at + _ROWS, len(split)))
        digest.update(np.ascontiguousarray(split.take(rows)).data)
    return digest.hexdigest()


def _kept(file: Path, key: str) -> NDArray[np.float32] | None:
    """The features in a file, if it is whole and has this key."""
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            if arrays["key"].item() == key:
                features: NDArray[np.float32] = arrays["features"]
                return features
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        pass  # there is none, or it is damaged: it is made anew
    return None


def _keep(file: Path, key: str, features: NDArray[np.float32]) -> None:
    """Writes under a name of its own and renames, so that two programs at once do not meet."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent, prefix=".unfinished-") as folder:
            unfinished = Path(folder) / file.name
            np.savez(unfinished, features=features, key=key)
            unfinished.replace(file)
    except OSError as error:
        log.warning("Features are not kept: %s cannot be written (%s).", file, error.strerror)
