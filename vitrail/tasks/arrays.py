"""Functions of NumPy arrays and torch tensors alike, so that the meaning of outputs is written once.

Exported graphs and training need tensors; ONNX files are run without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def softmax(x: Any) -> Any:
    """Over the second axis."""
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
    """Numbers of the kind, type and device of `like`."""
    if isinstance(like, np.ndarray):
        return np.asarray(values, like.dtype)
    import torch

    return torch.tensor(values, dtype=like.dtype, device=like.device)
