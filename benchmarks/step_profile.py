"""Where the time of a training step goes: the shares of matrix products, attention and other kinds of operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_KINDS = {
    "matrix products": ("mm", "linear", "convolution", "conv2d"),
    "attention": ("scaled_dot_product", "flash_attention"),
    "normalisation": ("layer_norm",),
    "copies and fills": ("copy", "fill", "zero", "cat", "stack", "clone", "contiguous", "empty", "index", "slice"),
    "element-wise": ("gelu", "add", "sub", "mul", "div", "sum", "mean", "softmax", "nll", "cross_entropy"),
}


def profile(step: Callable[[], Any], steps: int = 3) -> dict[str, float]:
    """The shares of a step's time by kind of operation. Times are those of the operations without their callees."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(steps):
            step()
    times: dict[str, float] = {}
    for event in found.events() or ():
        kind = _kind(event)
        times[kind] = times.get(kind, 0.0) + event.self_cpu_time_total
    return {kind: spent / sum(times.values()) for kind, spent in sorted(times.items(), key=lambda item: -item[1])}


def _kind(event: Any) -> str:
    """What an operation is for. All that clipping and the optimiser call is theirs."""
    above = event
    while above is not None:
        if above.name == "clip" or above.name.startswith("Optimizer."):
            return "clipping and optimiser"
        above = above.cpu_parent
    kinds = (kind for kind, parts in _KINDS.items() if any(part in event.name for part in parts))
    return next(kinds, "other") if event.name.startswith(("aten::", "mkldnn::")) else "other"
