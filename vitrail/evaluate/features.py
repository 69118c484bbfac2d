"""Outputs and feature vectors of each image of a split, cached in the run.

There is one file per data set and split, with a key that depends on the weights, the images and the preprocessing, and
with the engine that computed the values. If the key differs or another engine is wanted, the values are recomputed and
the file is replaced, so a run holds only the latest values.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitrail.data.cache import once
from vitrail.data.dataset import Split, annotated
from vitrail.data.loader import images as images_of
from vitrail.data.preprocess import Preprocess
from vitrail.errors import UserError
from vitrail.evaluate.stream import Keep, run_split, stream, stream_exported
from vitrail.files import atomic_write, open_regular
from vitrail.progress import log
from vitrail.runs import EngineName
from vitrail.runs.predictor import Predictor
from vitrail.tasks.placement import truths
from vitrail.tasks.scores import Scores
from vitrail.world import world

if TYPE_CHECKING:
    from vitrail.models import Model

Vectors = NDArray[np.float32]

_VERSION = 1  # increase when images or outputs are computed differently
_MOST = 2**30  # bytes of values to keep


def split_features(
    model: Model,
    split: Split,
    preprocess: Preprocess,
    file: Path,
    *,
    batch_size: int = 256,
    workers: int = 2,
    device: str = "cpu",
    engine: EngineName = "auto",
) -> Vectors:
    """The feature vectors of a split, (N, D): from `file` if nothing has changed, else recomputed."""
    from vitrail.runs.engine import Engine

    key = _key(model, split, preprocess)
    if key is not None and (kept := _kept(file, key, "features", engine)) is not None:
        return kept[0]
    compute = Engine(model, None, device, engine, "features")
    features, _ = run_split(
        model,
        split,
        preprocess,
        compute=compute,
        batch_size=batch_size,
        workers=workers,
        device=device,
        title=f"features of {file.stem}",
    )
    if key is not None and features.nbytes <= _MOST:
        _keep(file, key, "features", features, compute.name)
    return features


def split_scores(
    predictor: Predictor,
    split: Split,
    file: Path,
    *,
    keep: bool = True,
    cache_gb: float = 0.0,
    batch_size: int = 256,
    workers: int = 2,
    device: str = "cpu",
    engine: EngineName = "auto",
    title: str = "evaluating",
) -> tuple[Scores, Vectors | None, str]:
    """The scores for a split, the outputs, (N, M), and the engine: from `file` if nothing has changed, else recomputed.

    `engine` is the one that kept outputs must come from; `auto` accepts any.

    The split is streamed into the task's meter. Outputs above 1 GiB are kept neither in memory nor in the file, and
    returned as None. With `cache_gb`, decoded images are cached as in training.
    """
    card, version = predictor.card, split.version()
    key = None
    if version is not None:
        key = _digest(repr((_VERSION, predictor.fingerprint, card.preprocess, version))).hexdigest()
    meter, kept = card.task.meter(), Keep(_MOST)
    if key is not None and (found := _kept(file, key, "outputs", engine)) is not None:
        outputs, used = found
        targets = measured_targets(predictor, split, workers)
        meter.add(outputs, targets)
        return meter.scores(), outputs, used
    meters = meter, kept
    how: dict[str, Any] = {"batch_size": batch_size, "workers": workers, "title": title}
    if predictor.exported:
        stream_exported(predictor, split, meters, **how)
    else:
        images = once(split, card.preprocess, False, cache_gb, workers) if cache_gb else split
        stream(predictor.tensor_outputs, images, card.preprocess, meters, device=device, **how)
    if keep and key is not None and kept.outputs is not None:
        _keep(file, key, "outputs", kept.outputs, predictor.engine)
    return meter.scores(), kept.outputs, predictor.engine


def measured_targets(predictor: Predictor, split: Split, workers: int = 2) -> NDArray[Any]:
    """What the outputs for a split are measured against: its targets, or for annotations `Truth`."""
    if not annotated(split.targets):
        return split.targets
    place = predictor.card.preprocess.placement
    return truths(split.targets, (place(*image.shape[:2]) for image in images_of(split, workers)))


def _digest(text: str) -> hashlib.blake2b:
    return hashlib.blake2b(text.encode(), digest_size=16)


def _key(model: Model, split: Split, preprocess: Preprocess) -> str | None:
    """A hash of everything that features depend on; None if the images may change unnoticed."""
    import torch

    version = split.version()
    if version is None:
        return None
    digest = _digest(repr((_VERSION, model.config, preprocess, version)))
    for name, value in model.state_dict().items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _kept(file: Path, key: str, name: str, engine: EngineName) -> tuple[Vectors, str] | None:
    """The values in a file and the engine that computed them, if it is intact and they are what is wanted."""
    found = _read(file, key, name, engine)
    return None if any(world().agree(found is None)) else found  # all compute, or none


def _read(file: Path, key: str, name: str, engine: EngineName) -> tuple[Vectors, str] | None:
    try:
        with open_regular(file) as stream, np.load(stream, allow_pickle=False) as arrays:
            used = arrays["engine"].item() if "engine" in arrays else "torch"  # as in files of earlier versions
            if arrays["key"].item() == key and engine in ("auto", used):
                return arrays[name], used
    except Exception:  # missing or damaged: recompute
        pass
    return None


def _keep(file: Path, key: str, name: str, values: Vectors, engine: str) -> None:
    """Keeps vectors for the next command, if the disk allows it."""
    if not world().first():
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(file) as temporary, temporary.open("wb") as stream:  # by a name, savez would change it
            arrays = {name: values}
            np.savez(stream, key=key, engine=engine, **arrays)  # type: ignore[arg-type,unused-ignore]
    except (OSError, UserError) as error:
        log.warning("The %s are not cached. %s", name, error)
