"""Watches a self-supervised run: k-NN accuracy on labelled images, collapse, and pictures of what it predicts."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail.charts.measure import count
from vitrail.charts.style import save
from vitrail.charts.tiles import Caption, Section, Tile, sheet
from vitrail.config import TrainConfig
from vitrail.data import Data, open_data
from vitrail.data.dataset import Split, Subset, choose
from vitrail.data.loader import batches
from vitrail.data.pixels import Pixels, to_pil
from vitrail.errors import UserError
from vitrail.evaluate.probes import knn
from vitrail.evaluate.stream import run_split
from vitrail.models import Model
from vitrail.progress import log
from vitrail.runs.run import Row, Run
from vitrail.tasks.objective import Objective
from vitrail.tasks.scores import Scores
from vitrail.train.progress import Progress
from vitrail.weights import Card
from vitrail.world import world

_PROBED = {"train": 5000, "val": 2000}  # images of the probe data, at most
_TIMES = 20  # k-NN measurements of a run, at most
_PICTURES = 8
_DRAW_EVERY = 10.0  # seconds


def open_probe(config: TrainConfig) -> Data | None:
    """The labelled data of --probe; None without it. Raises UserError if it is not multi-class."""
    source = config.run.probe
    if source is None:
        return None
    try:
        data = open_data(source, data_dir=config.source.data_dir)
        if not data.task.single:
            raise UserError(f"it needs one class per image, but {source} is {data.task.title}.")
        return data.read_as(config.input.channels, config.input.bits)
    except UserError as error:
        raise UserError(f"--probe {source}: {error}") from error


class Watch:
    """What is measured and drawn after the epochs of a run, besides the scores; nothing for labelled tasks."""

    def __init__(self, run: Run, config: TrainConfig, card: Card, val: Split):
        self._run, self._config, self._card, self._val = run, config, card, val
        data = open_probe(config)
        self._probe = {} if data is None else {part: _some(data.splits[part], most) for part, most in _PROBED.items()}
        if data is not None:
            train, tested = (count(len(self._probe[part])) for part in _PROBED)
            log.info(
                f"k-NN accuracy is measured on {tested} of {config.run.probe}, with {train} of its training split."
            )
        self._told: set[str] = set()  # problems of the features
        self._drew = -math.inf

    def __call__(self, objective: Objective, kept: Model, scores: Scores, progress: Progress, last: bool) -> Row:
        """Additional scores of an epoch; k-NN accuracy is carried over between measurements."""
        if self._card.task.labelled:
            return {}
        means = {name: progress.mean(name) for name in progress.sums}
        found = self._card.task.health(scores, means, self._config)
        if found.problem and found.problem not in self._told:
            (log.info if found.healthy is None else log.warning)(found.sentence)
            self._told.add(found.problem)
        if world().first() and (last or time.monotonic() - self._drew > _DRAW_EVERY):
            self._draw(objective, kept)
            self._drew = time.monotonic()
        if not self._probe:
            return {}
        epoch, before = len(progress.rows) + 1, progress.rows[-1].get("val_knn") if progress.rows else None
        every = math.ceil(self._config.optim.epochs / _TIMES)
        due = before is None or last or epoch % every == 0
        return {"knn": self._accuracy(kept) if due or before is None else before}

    def _accuracy(self, model: Model) -> float:
        """The top-1 accuracy of a k-NN classifier on features of the probe data."""
        how: dict[str, Any] = {"workers": self._config.source.workers, "device": self._config.run.device}
        found = {
            part: run_split(model, split, self._card.preprocess, compute=model.embed, title=f"k-NN, {part}", **how)
            for part, split in self._probe.items()
        }
        return knn(*found["train"], *found["val"], k=min(20, len(self._probe["train"]))).top1

    def _draw(self, objective: Objective, model: Model) -> None:
        """Saves originals, masked images and predictions of the first validation images, if the method has them."""
        preprocess, device = self._card.preprocess, self._config.run.device
        pixels, _ = next(batches(self._val, preprocess, _PICTURES, 1, range(min(_PICTURES, len(self._val)))))
        training = model.training
        with torch.inference_mode():
            drawn = objective.reconstruct(model.eval(), preprocess.normalise(pixels.to(device)))
        model.train(training)
        if drawn is None:
            return
        hidden = drawn.masked.isnan().any(dim=1).cpu().numpy()
        parts = [_views(preprocess.restore(part.nan_to_num())) for part in drawn[:3]]
        pictures = [[to_pil(image, like) for image, like in zip(part, parts[0], strict=True)] for part in parts]
        for picture, patches in zip(pictures[1], hidden, strict=True):
            picture.paste("grey", mask=Image.fromarray(patches))
        rows = [
            [Tile(picture, [Caption(title)] if i == 0 else []) for i, picture in enumerate(row)]
            for title, row in zip(("original", "masked", "predicted"), pictures, strict=True)
        ]
        section = Section(
            "Reconstruction", f"Validation images: original, masked, predicted. {drawn.note}".strip(), rows
        )
        save(sheet(section), self._run.reconstruction_file)


def _views(pixels: Tensor) -> Pixels:
    return pixels.permute(0, 2, 3, 1).cpu().numpy()


def _some(split: Split, most: int) -> Split:
    """A fixed random sample of a split."""
    return split if len(split) <= most else Subset(split, np.sort(choose(len(split), most)))
