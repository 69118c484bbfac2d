"""No matrix of attention weights, N×N, is ever in memory: neither in training nor in inference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
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


@pytest.mark.parametrize("use", [train, infer])
@pytest.mark.parametrize("pool", ["cls", "gap", "map"])
def test_no_operation_returns_the_matrix_of_attention_weights(use: Callable[[Model], None], pool: str):
    model, tokens = vit(32, pool=pool), 32 * 32
    with Outputs() as outputs:
        use(model)
    assert tokens < outputs.largest < tokens**2
    with Outputs() as outputs, torch.no_grad():
        model.attentions()[0].module.weights(torch.randn(1, tokens, 16))
    assert outputs.largest == HEADS * tokens**2  # so that it would be noticed


@pytest.mark.parametrize("use", [train, infer])
def test_peak_memory_grows_linearly_with_the_tokens(use: Callable[[Model], None]):
    small, large = (peak_memory(use, vit(patches)) for patches in (16, 64))
    assert 8 * small < large < 20 * small  # 16 times the tokens; the square would be 256 times


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
