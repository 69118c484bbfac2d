"""The learning-rate range test: a short run whose learning rate grows until the loss rises.

https://arxiv.org/abs/1506.01186. It takes the steps of ordinary training with its own learning rates, without
validation, checkpoints or a run folder.
"""

from __future__ import annotations

import json
from contextlib import suppress
from itertools import islice
from pathlib import Path

import numpy as np

from vitrail.charts.build import lr_range
from vitrail.charts.draw import save_charts
from vitrail.config import TrainConfig, override
from vitrail.data import Data
from vitrail.errors import UserError
from vitrail.files import check_writable, free_name, write_text
from vitrail.models import Model
from vitrail.progress import log, track
from vitrail.train.custom import NOTHING, Custom
from vitrail.train.divergence import Diverged
from vitrail.train.loop import steps
from vitrail.train.prepare import make_card, open_splits
from vitrail.train.progress import Progress
from vitrail.train.setup import set_up
from vitrail.train.summary import describe
from vitrail.world import world

LOWEST, HIGHEST, STEPS = 1e-6, 10.0, 175  # 25 steps for every factor of 10
_TRUSTED = 10  # steps before a rising loss can stop the test
_WIDTH = 4.0  # standard deviation of the smoothing, in steps


def find_lr(config: TrainConfig, data: Data, model: Model, custom: Custom = NOTHING) -> Path:
    """Suggests a learning rate; returns the folder with the curve. If interrupted, it writes nothing."""
    config = override(config, {"model_ema": 0.0, "name": f"{config.run.name}-find-lr"})
    world().once(lambda: check_writable(Path(config.run.out)))
    log.info(describe(config, data, model))
    losses = measure(config, data, model, custom)
    lr = suggest(losses)
    folder = world().once(
        lambda: write(Path(config.run.out) / free_name(Path(config.run.out), config.run.name), losses, lr)
    )
    curve = smooth(losses)
    if (fall := 1 - min(curve) / curve[0]) < 0.05:
        log.warning(f"The loss fell by only {fall:.1%}, so the suggestion means little. Look at the curve.")
    log.info(f"The loss falls fastest at a learning rate of {lr:g}; the recipe's is {config.optim.lr:g}.")
    log.info(f"The curve is {folder / 'lr.png'}. Next: vitrail train {config.data} … --lr {lr:g}")
    return folder


def measure(config: TrainConfig, data: Data, model: Model, custom: Custom = NOTHING) -> list[float]:
    """The losses of steps with growing learning rates, until they rise or training diverges."""
    _, loader = world().in_turn(lambda: open_splits(config, data, custom))
    progress, card, targets = Progress(), make_card(config, data, model), data.splits["train"].targets
    learning = set_up(model, card, config, targets, progress, world(), custom)
    walk = steps(*learning, loader, len(data.classes), config, growing, progress, world())
    losses: list[float] = []
    with suppress(Diverged):
        for values in track(islice(walk, STEPS), "finding a learning rate", STEPS, "step"):
            losses.append(values["loss"])
            if rising(losses):
                break
    return losses


def growing(progress: Progress) -> float:
    """The learning rate of the next step: each is larger than the one before by the same factor."""
    return rate(progress.step)


def rate(step: int) -> float:
    return LOWEST * (HIGHEST / LOWEST) ** (step / (STEPS - 1))


def rising(losses: list[float]) -> bool:
    """Whether the loss is well above its start or its lowest value."""
    if len(losses) < _TRUSTED:
        return False
    recent = float(np.mean(losses[-5:]))
    return recent > 1.5 * float(np.mean(losses[:_TRUSTED])) or recent > 4 * min(smooth(losses))


def suggest(losses: list[float]) -> float:
    """The learning rate at which the loss falls fastest, to two digits."""
    curve = smooth(losses)
    slopes = np.gradient(curve)
    steepest = int(slopes[: int(np.argmin(curve)) + 1].argmin())
    if slopes[steepest] >= 0:
        raise UserError(
            "The loss fell at no learning rate, so there is none to suggest. Check the data with `vitrail check`, or "
            "use a larger --batch-size."
        )
    return float(f"{rate(steepest):.2g}")


def write(folder: Path, losses: list[float], lr: float) -> Path:
    """Creates a folder with the curve, lr.png, and its values, lr.json."""
    rates, curve = [rate(step) for step in range(len(losses))], smooth(losses)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"The folder {folder} cannot be created: {error.strerror}. Choose another --out.") from error
    numbers = {"suggestion": lr, "lr": rates, "loss": losses, "smoothed": curve}
    write_text(folder / "lr.json", json.dumps(numbers, indent=2) + "\n")
    save_charts([lr_range(rates, losses, curve, lr)], folder)
    return folder


def smooth(losses: list[float]) -> list[float]:
    """The losses smoothed by a Gaussian, which unlike a running mean has no lag.

    An exploding loss is clipped at twice the initial losses, so that it does not dominate its neighbours.
    """
    limit = 2 * float(np.median(losses[:_TRUSTED]))
    places = np.arange(len(losses))
    weights = np.exp(-0.5 * ((places[:, None] - places) / _WIDTH) ** 2)
    averaged: list[float] = (weights @ np.minimum(losses, limit) / weights.sum(1)).tolist()
    return averaged
