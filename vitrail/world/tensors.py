"""The tensors of a state dict, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


def mapped(change: Callable[[str, Tensor], Any], state: Any, name: str = "") -> Any:
    """A state dict with each of its tensors changed. The name of a tensor is its path: `model/head.weight`."""
    if isinstance(state, Tensor):
        return change(name, state)
    if isinstance(state, Mapping):
        return {key: mapped(change, value, f"{name}/{key}" if name else str(key)) for key, value in state.items()}
    if isinstance(state, list):
        return [mapped(change, value, f"{name}/{i}") for i, value in enumerate(state)]
    return state
