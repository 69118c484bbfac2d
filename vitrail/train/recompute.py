"""Activation checkpointing: less memory for more time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from vitrail.models import Model


def recompute_activations(model: Model) -> None:
    """Activation checkpointing: each stage keeps only its input and is recomputed in the backward pass."""
    for stage in model.stages():
        norms = [module for module in stage.modules() if isinstance(module, nn.BatchNorm2d)]
        again = partial(checkpoint, stage.forward, use_reentrant=False)
        stage.forward = partial(again, context_fn=partial(_contexts, norms)) if norms else again


def _contexts(norms: list[nn.BatchNorm2d]) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The contexts of a stage's forward pass and of its recomputation."""
    return nullcontext(), _untracked(norms)


@contextmanager
def _untracked(norms: list[nn.BatchNorm2d]) -> Iterator[None]:
    """Stops the recomputation from updating the running statistics a second time."""
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
        norm.num_batches_tracked = None if norm.num_batches_tracked is None else norm.num_batches_tracked.clone()
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, count
