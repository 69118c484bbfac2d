"""What a small ViT allocates in training and in inference, counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile
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
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        use(model)
    assert found.profiler is not None
    events = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        highest = max(highest, held)
    return highest
