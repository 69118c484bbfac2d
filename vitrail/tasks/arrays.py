"""Functions that work on NumPy arrays and torch tensors, so that `Task.meaning` is written once.

Exported graphs and training need tensors; ONNX files run without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def softmax(x: Any) -> Any:
    """Softmax over the second axis."""
    if not isinstance(x, np.ndarray):
        return x.softmax(dim=1)
    return np.exp(x - logsumexp(x)[:, None])


def sigmoid(x: Any) -> Any:
    if not isinstance(x, np.ndarray):
        return x.sigmoid()
    return np.exp(-np.logaddexp(0, -x))


def logsumexp(x: NDArray[np.floating]) -> NDArray[np.float64]:
    """The logarithm of the sum of exponentials over the second axis. scipy's takes most of a second to import."""
    top = x.max(axis=1, keepdims=True)
    return np.asarray(np.log(np.exp(x - top).sum(axis=1)) + top[:, 0])


def constant(values: Sequence[float], like: Any) -> Any:
    """Values as an array or tensor with the dtype and device of `like`."""
    if isinstance(like, np.ndarray):
        return np.asarray(values, like.dtype)
    import torch

    return torch.tensor(values, dtype=like.dtype, device=like.device)
