"""Less memory for more computation, and less computation for more memory."""

from __future__ import annotations

import ctypes
from functools import partial

from torch.utils.checkpoint import checkpoint

from vitrail.models import Model
from vitrail.models.layers import Stage


def recompute_activations(model: Model) -> None:
    """Makes every stage that is called as one keep only its input, and run again in the backward pass."""
    for stage in model.stages():
        if not isinstance(stage, Stage):
            stage.forward = partial(checkpoint, stage.forward, use_reentrant=False)


def keep_freed_memory() -> None:
    """Has the C library keep large blocks that are freed, instead of asking the kernel for them again in every step.

    The kernel hands memory out page by page and blank, which takes time in every step. Only glibc can be told;
    elsewhere this does nothing.
    """
    trim_threshold, mmap_max = -1, -4  # as in malloc.h
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, 2**31 - 1)
