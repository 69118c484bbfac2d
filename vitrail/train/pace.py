"""The training speed of a configuration, measured before the run, to convert a time budget to epochs."""

from __future__ import annotations

import time

import numpy as np
import torch

from vitrail.config import TrainConfig
from vitrail.data import Data
from vitrail.train.batch import make_batch, read_size
from vitrail.train.custom import NOTHING, Custom
from vitrail.train.optim import build_optimizers
from vitrail.train.prepare import make_card, prepare, preprocessing
from vitrail.train.recompute import recompute_activations
from vitrail.train.setup import autocast

_SECONDS = 2.0


def images_per_second(
    config: TrainConfig,
    data: Data,
    custom: Custom = NOTHING,
    batch_size: int | None = None,
    seconds: float | None = None,
) -> float:
    """Approximate training speed: optimiser steps on blank images for some seconds, by default two."""
    seconds = _SECONDS if seconds is None else seconds
    model, _ = prepare(config, data, custom)
    device, size, targets = config.run.device, batch_size or config.optim.pass_size, data.splits["train"].targets
    objective = make_card(config, data, model).task.objective(model.to(device), config, targets).to(device)
    if config.run.grad_checkpointing:
        recompute_activations(model)
    added = objective.added().values()
    optimizers = build_optimizers(model, config.optim, pretrained=config.weights is not None, added=added)
    seen = read_size(config, data, preprocessing(config))
    pixels = torch.from_numpy(np.zeros((size, seen.channels, *seen.img_size), seen.dtype)).to(device)
    placed = data.task.annotated
    given = data.task.blank(size, seen.img_size) if placed else np.resize(targets[:size], (size, *targets.shape[1:]))
    labels = torch.from_numpy(given).to(device)
    precision = autocast(config)
    count, begun = -2, time.monotonic()  # two for warm-up
    while count < 3 or time.monotonic() - begun < seconds:
        if count == 0:
            begun = time.monotonic()
        generator = torch.Generator().manual_seed(count + 2)
        how = config, seen.normalise, len(data.classes), generator, placed
        batch = make_batch(pixels, labels, torch.arange(size), *how)
        with precision():
            loss = objective(batch)["loss"]
        torch.autograd.backward(loss)
        if (count + 2) % config.optim.grad_accum == 0:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)
        count += 1
    return count * size / (time.monotonic() - begun)
