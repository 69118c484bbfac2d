"""Streams the images of a split through a model, batch by batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from vitrail.data.dataset import Split, annotated
from vitrail.data.loader import batches, image_of
from vitrail.data.pixels import Pixels
from vitrail.data.preprocess import Preprocess
from vitrail.progress import track
from vitrail.runs.predictor import Predictor, read_ahead
from vitrail.tasks.placement import Placement, truths
from vitrail.world import world

if TYPE_CHECKING:
    from torch import Tensor

    from vitrail.models import Model

Outputs = NDArray[np.float32]


class Meter(Protocol):
    """Anything that accumulates outputs and targets batch by batch."""

    def add(self, outputs: Outputs, targets: NDArray[Any]) -> None: ...

    def merge(self, other: Any) -> None: ...


class Keep:
    """Collects all outputs and targets; none if they exceed `limit` bytes."""

    def __init__(self, limit: float = math.inf) -> None:
        self._outputs: list[Outputs] = []
        self._targets: list[NDArray[Any]] = []
        self._room = limit

    def add(self, outputs: Outputs, targets: NDArray[Any]) -> None:
        self._room -= outputs.nbytes  # of annotations, the files stay on disk
        if self._room < 0:
            self._outputs.clear()
            self._targets.clear()
        else:
            self._outputs.append(outputs)
            self._targets.append(targets)

    def merge(self, other: Keep) -> None:
        """Appends what another one has collected; none if one of them has exceeded its limit."""
        self._room = min(self._room, other._room)
        self._outputs += other._outputs
        self._targets += other._targets

    @property
    def outputs(self) -> Outputs | None:
        return np.concatenate(self._outputs) if self._room >= 0 else None

    @property
    def targets(self) -> NDArray[Any]:
        return np.concatenate(self._targets)


def stream(
    compute: Callable[[Tensor], Tensor],
    split: Split,
    preprocess: Preprocess,
    meters: Sequence[Meter],
    *,
    batch_size: int = 256,
    workers: int = 2,
    device: str = "cpu",
    title: str = "evaluating",
) -> None:
    """Runs `compute` on a split's pixels (B, C, H, W), in order, and adds results and targets to every meter."""
    import torch

    share = _share(len(split), batch_size)
    loader = track(
        batches(split, preprocess, batch_size, workers, share), title, math.ceil(len(share) / batch_size), "batch"
    )
    with torch.inference_mode():
        for pixels, targets in loader:
            outputs = compute(pixels.to(device)).float().cpu().numpy()
            against = targets.numpy() if isinstance(targets, torch.Tensor) else targets
            for meter in meters:
                meter.add(outputs, against)
    _merge(meters)


def _share(images: int, batch_size: int) -> range:
    """The images that this process computes: whole batches, the same ones as in a single process."""
    mine = world().part(range(math.ceil(images / batch_size)))
    return range(mine[0] * batch_size, min((mine[-1] + 1) * batch_size, images)) if mine else range(0)


def _merge(meters: Sequence[Meter]) -> None:
    """Merges the meters of all processes into those of each."""
    for meter in meters:
        vars(meter).update(vars(world().merge(meter)))


def stream_exported(
    predictor: Predictor, split: Split, meters: Sequence[Meter], *, batch_size: int, workers: int, title: str
) -> None:
    """`stream` for an exported file, without torch."""
    share = _share(len(split), batch_size)
    reader = split.reader(np.arange(share.start, share.stop))

    def read(i: int) -> tuple[Pixels, Placement]:
        image = image_of(reader, i)
        return predictor.pixels(image), predictor.card.preprocess.placement(*image.shape[:2])

    with closing(read_ahead(share, read, workers, ahead=2 * batch_size)) as images:
        for _ in track(range(math.ceil(len(share) / batch_size)), title, unit="batches"):
            numbers, found = zip(*islice(images, batch_size), strict=True)
            pixels, placements = zip(*found, strict=True)
            outputs = predictor.outputs(np.stack(pixels))
            targets = split.targets[list(numbers)]
            for meter in meters:
                meter.add(outputs, truths(targets, placements) if annotated(targets) else targets)
    _merge(meters)


def run_model(
    model: Model,
    split: Split,
    preprocess: Preprocess,
    meters: Sequence[Meter],
    *,
    compute: Callable[[Tensor], Tensor] | None = None,
    batch_size: int = 256,
    workers: int = 2,
    device: str = "cpu",
    title: str = "evaluating",
) -> None:
    """Streams a split through a model in evaluation mode, or through its method `compute`, into meters."""
    how, training = compute or model, model.training
    model.eval()
    try:
        stream(
            lambda pixels: how(preprocess.normalise(pixels)),
            split,
            preprocess,
            meters,
            batch_size=batch_size,
            workers=workers,
            device=device,
            title=title,
        )
    finally:
        model.train(training)


def run_split(model: Model, split: Split, preprocess: Preprocess, **how: Any) -> tuple[Outputs, NDArray[Any]]:
    """A model's outputs for every image of a split, in order, and the targets; `how` as in `run_model`."""
    kept = Keep()
    run_model(model, split, preprocess, [kept], **how)
    assert kept.outputs is not None  # there is no limit
    return kept.outputs, kept.targets
