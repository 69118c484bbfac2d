"""Less memory for more computation."""

from __future__ import annotations

from functools import partial

from torch.utils.checkpoint import checkpoint

from vitrail.models import Model
from vitrail.models.layers import Stage


def recompute_activations(model: Model) -> None:
    """Makes every stage that is called as one keep only its input, and run again in the backward pass."""
    for stage in model.stages():
        if not isinstance(stage, Stage):
            stage.forward = partial(checkpoint, stage.forward, use_reentrant=False)
