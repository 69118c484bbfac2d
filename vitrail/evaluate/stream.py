"""Streams the images of a split through a model, batch by batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.data.dataset import Split
from vitrail.data.loader import batches
from vitrail.data.preprocess import Preprocess
from vitrail.device import Precision
from vitrail.models import Model
from vitrail.progress import track

Outputs = NDArray[np.float32]


class Meter(Protocol):
    """Whatever takes outputs and targets batch by batch."""

    def add(self, outputs: Outputs, targets: NDArray[Any]) -> None: ...


class Keep:
    """Keeps all outputs and targets, for what needs them at once."""

    def __init__(self) -> None:
        self._outputs: list[Outputs] = []
        self._targets: list[NDArray[Any]] = []

    def add(self, outputs: Outputs, targets: NDArray[Any]) -> None:
        self._outputs.append(outputs)
        self._targets.append(targets)

    @property
    def outputs(self) -> Outputs:
        return np.concatenate(self._outputs)

    @property
    def targets(self) -> NDArray[Any]:
        return np.concatenate(self._targets)


def stream(
    compute: Callable[[Tensor], Tensor],
    split: Split,
    preprocess: Preprocess,
    meter: Meter,
    *,
    batch_size: int = 256,
    workers: int = 2,
    device: str = "cpu",
    amp: Precision = "off",
    title: str = "evaluating",
) -> None:
    """Adds what `compute` makes of a split's pixels (B, C, H, W), in their order, and the targets to a meter."""
    precision = torch.float16 if amp == "fp16" else torch.bfloat16
    autocast = torch.autocast(torch.device(device).type, precision, enabled=amp != "off")
    loader = track(batches(split, preprocess, batch_size, workers), title, math.ceil(len(split) / batch_size), "batch")
    with torch.inference_mode(), autocast:
        for pixels, targets in loader:
            meter.add(compute(pixels.to(device)).float().cpu().numpy(), targets.numpy())


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
) -> tuple[Outputs, NDArray[Any]]:
    """The outputs of a model, or of a method of it, for every image of a split, in order; and the targets."""
    kept, how, training = Keep(), compute or model, model.training
    model.eval()
    try:
        stream(
            lambda pixels: how(preprocess.normalise(pixels)),
            split,
            preprocess,
            kept,
            batch_size=batch_size,
            workers=workers,
            device=device,
            amp=amp,
            title=title,
        )
    finally:
        model.train(training)
    return kept.outputs, kept.targets
