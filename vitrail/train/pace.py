"""The training speed of a configuration, measured before the run, to convert a time budget to epochs."""

from __future__ import annotations

import time

import numpy as np
import torch

from vitrail.config import TrainConfig
from vitrail.data import Data
from vitrail.train.batch import make_batch, read_size
from vitrail.train.custom import NOTHING, Custom
from vitrail.train.prepare import make_card, prepare, preprocessing

_SECONDS = 2


def images_per_second(config: TrainConfig, data: Data, custom: Custom = NOTHING) -> float:
    """Approximate training speed: steps of the objective on blank images for about two seconds, without optimiser."""
    model, _ = prepare(config, data, custom)
    device, size, targets = config.run.device, config.optim.batch_size, data.splits["train"].targets
    objective = make_card(config, data, model).task.objective(model.to(device), config, targets).to(device)
    seen = read_size(config, data, preprocessing(config))
    pixels = torch.from_numpy(np.zeros((size, seen.channels, *seen.img_size), seen.dtype)).to(device)
    labels = torch.from_numpy(np.resize(targets, (size, *targets.shape[1:]))).to(device)
    count, begun = -2, time.monotonic()  # two for warm-up
    while count < 3 or time.monotonic() - begun < _SECONDS:
        if count == 0:
            begun = time.monotonic()
        generator = torch.Generator().manual_seed(count + 2)
        which = torch.arange(size)
        batch = make_batch(pixels, labels, which, config, seen.normalise, len(data.classes), generator)
        torch.autograd.backward(objective(batch)["loss"])
        objective.zero_grad(set_to_none=True)
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)
        count += 1
    return count * size / (time.monotonic() - begun)
