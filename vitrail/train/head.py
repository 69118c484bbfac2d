"""A new head that starts as a linear probe: LP-FT, https://arxiv.org/abs/2202.10054.

A head that starts at zero changes the features of trained weights while it learns; one that is first fitted to the
frozen features changes them less.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.config import TrainConfig
from vitrail.data.dataset import Split, Subset, choose
from vitrail.evaluate.probes import logistic
from vitrail.evaluate.stream import run_split
from vitrail.models import Model
from vitrail.progress import log
from vitrail.train.progress import Progress
from vitrail.weights import Card
from vitrail.world import world

_IMAGES = 5000  # to which the head is fitted, at most
_CLASSES = 1000  # with more, these images are too few
_LONGEST = 2.0  # most length of a class's weights; longer ones let the first steps destroy the features


def fit_head(model: Model, card: Card, config: TrainConfig, train: Split, progress: Progress) -> None:
    """Fits a new head to the features of training images, if --head-init probe asks for it.

    A head that is not zero came with the weights and is kept. The time counts towards the run's budget.
    """
    heads, classes = model.classifiers(), card.task.outputs
    if config.transfer.head_init != "probe" or len(heads) != 1 or heads[0].weight.any():
        return
    if classes > _CLASSES:
        log.info(f"The new head starts at zero: a linear probe is for up to {_CLASSES:,} classes.")
        return
    (head,) = heads
    some = train if len(train) <= _IMAGES else Subset(train, choose(len(train), _IMAGES, config.run.seed))
    how: dict[str, Any] = {"workers": config.source.workers, "device": config.run.device, "title": "fitting the head"}
    model.to(config.run.device)
    with _Inputs(head) as features:
        x, y = run_split(model, some, card.preprocess, compute=features.of(model), **how)
    weights, bias = world().once(lambda: logistic(x, y, classes))
    scale = min(1.0, _LONGEST / max(float(np.linalg.norm(weights, axis=1).max()), 1e-12))
    with torch.no_grad():
        head.weight.copy_(torch.from_numpy(scale * weights).view_as(head.weight))
        if head.bias is not None:
            head.bias.copy_(torch.from_numpy(scale * bias))
    log.info(f"The new head starts as a linear probe of {len(some):,} training images.")
    progress.prepared += progress.tick()


class _Inputs:
    """Catches what a layer reads in a forward pass of its model, whatever is before it."""

    def __init__(self, layer: nn.Module):
        self._hook = layer.register_forward_pre_hook(self._keep)

    def __enter__(self) -> _Inputs:
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def _keep(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._seen = inputs[0].flatten(1)

    def of(self, model: Model) -> Any:
        def compute(images: Tensor) -> Tensor:
            model(images)
            return self._seen

        return compute
