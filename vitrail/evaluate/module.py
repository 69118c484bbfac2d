"""Measures the predictions of a model in memory."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from vitrail.config import Size
from vitrail.data import Data, Source, open_data
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources import open_source
from vitrail.device import choose_device
from vitrail.errors import UserError
from vitrail.evaluate.measure import check_batch, split_name, write_scores
from vitrail.evaluate.stream import run_model
from vitrail.models import Model, as_model
from vitrail.tasks.scores import Scores
from vitrail.weights import Card


def evaluate_module(
    module: nn.Module,
    source: Source | None,
    split: str | None,
    where: Mapping[str, Any],
    preprocess: Preprocess | None = None,
    *,
    batch_size: int = 256,
    workers: int = 2,
    device: str | None = None,
    out: str | Path | None = None,
) -> Scores:
    """Measures the predictions of a model in memory; writes to `out`, or nothing.

    A loaded model has its own classes and preprocessing. Any other has the classes of the data, and by default reads
    pixels from -1 to 1, at its own size, or as a plain module at the size of the data.
    """
    check_batch(batch_size)
    if source is None:
        raise UserError("No data was given. Give what to evaluate the model on: vitrail.evaluate(model, data).")
    card: Card | None = module.card if isinstance(module, Model) else None
    task = open_source(source, **where).task.plain() if card is None else card.task
    data = open_data(source, **where, model=task)
    model = module if isinstance(module, Model) else as_model(module, *_read_size(data, preprocess), task.outputs)
    if card is None:
        seen = Preprocess(model.config.img_size, model.config.channels)
        card = Card(model=type(module).__name__, config=model.config, task=task, preprocess=seen)
    if preprocess is not None:
        card = replace(card, preprocess=preprocess)
    if model.config.classes != task.outputs:
        raise UserError(
            f"The model has {model.config.classes} outputs, but the data has {len(task.classes)} {task.many}."
        )
    place = str(next(module.parameters()).device)
    if device is not None and (place := choose_device(device)) != str(next(module.parameters()).device):
        model = copy.deepcopy(model).to(place)
    name, training = split_name(data, split), module.training
    meter = task.meter()
    read = data.read_as(card.preprocess.channels, card.preprocess.bits).splits[name]
    try:
        how: dict[str, Any] = {"batch_size": batch_size, "workers": workers, "device": place, "title": "evaluating"}
        run_model(model.eval(), read, card.preprocess, [meter], **how)
    finally:
        module.train(training)
    scores: Scores = meter.scores()
    if out is None:
        return scores
    write_scores(scores, task.charts(scores), Path(out), {"model": card.model, "data": data.name, "split": name})
    return replace(scores, folder=Path(out))


def _read_size(data: Data, preprocess: Preprocess | None) -> tuple[Size, int]:
    """The image size and channels of a plain module: those of its preprocessing, or of the data."""
    return (data.size, data.channels) if preprocess is None else (preprocess.img_size, preprocess.channels)
