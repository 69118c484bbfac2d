"""Memory against speed: activation checkpointing, and how the C library frees memory."""

from __future__ import annotations

import ctypes
from functools import partial

from torch.utils.checkpoint import checkpoint

from vitrail.models import Model
from vitrail.models.layers import Stage


def recompute_activations(model: Model) -> None:
    """Activation checkpointing: each stage keeps only its input and runs again in the backward pass."""
    for stage in model.stages():
        if not isinstance(stage, Stage):
            stage.forward = partial(checkpoint, stage.forward, use_reentrant=False)


def keep_freed_memory() -> None:
    """Makes glibc keep large freed blocks instead of returning them to the kernel; elsewhere this does nothing.

    The kernel zeroes every page it hands out, which would cost time in every step.
    """
    trim_threshold, mmap_max = -1, -4  # as in malloc.h
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, 2**31 - 1)
