"""What a small ViT allocates in training and in inference, counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch._C._profiler import ProfilerConfig, _ExperimentalConfig
from torch.autograd import ProfilerState, _disable_profiler_legacy, _enable_profiler_legacy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vitrail.models import Model, create

BATCH, HEADS = 2, 2


class Outputs(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.largest = max([self.largest, *sizes])
        return result


def vit(patches: int, **changes: Any) -> Model:
    """A small ViT with this many patches per side."""
    size = 4 * patches
    return create("vit_nano4", img_size=size, width=16, depth=2, heads=HEADS, mlp=32, stem="patch", **changes)


def train(model: Model) -> None:
    images, labels = torch.randn(BATCH, 3, *model.config.img_size), torch.zeros(BATCH, dtype=torch.int64)
    F.cross_entropy(model.train()(images), labels).backward()


def infer(model: Model) -> None:
    with torch.no_grad():  # in inference mode, `Outputs` would not see what attention consists of
        model.eval()(torch.randn(BATCH, 3, *model.config.img_size))


def peak_memory(use: Callable[[Model], None], model: Model) -> int:
    """The most bytes allocated at once, also inside kernels."""
    # Records in their order: kineto sorts by time stamps, and on a busy machine drops those that seem to be older than
    # the recording, at times all.
    config = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    _enable_profiler_legacy(config)
    try:
        use(model)
    finally:
        threads = _disable_profiler_legacy()
    held = highest = 0
    for record in (record for records in threads for record in records if record.kind() == "memory_alloc"):
        held += record.cpu_memory_usage()
        highest = max(highest, held)
    assert highest > 0
    return highest
