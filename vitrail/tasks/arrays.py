"""Functions that work on NumPy arrays and torch tensors, so that `Task.meaning` is written once.

Exported graphs and training need tensors; ONNX files run without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def softmax(x: Any) -> Any:
    """Softmax over the second axis."""
    if not isinstance(x, np.ndarray):
        return x.softmax(dim=1)
    from scipy.special import softmax

    return softmax(x, axis=1)


def sigmoid(x: Any) -> Any:
    if not isinstance(x, np.ndarray):
        return x.sigmoid()
    from scipy.special import expit

    return expit(x)


def constant(values: Sequence[float], like: Any) -> Any:
    """Values as an array or tensor with the dtype and device of `like`."""
    if isinstance(like, np.ndarray):
        return np.asarray(values, like.dtype)
    import torch

    return torch.tensor(values, dtype=like.dtype, device=like.device)
