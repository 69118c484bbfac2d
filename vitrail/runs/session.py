"""What every runtime of exported files offers, and the number of threads that it computes with."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Input = tuple[str, type[np.generic] | None, tuple[int | None, ...]]  # name, type, shape; None if unknown or dynamic


class Session(Protocol):
    """A file opened by its runtime."""

    engine: str
    title: str
    inputs: list[Input]
    outputs: list[str]
    metadata: Mapping[str, str]

    def expect(self, shape: tuple[int, ...]) -> None:
        """Tells that most images have this shape, (H, W, C)."""

    def run(self, images: Array, outputs: list[str]) -> list[Array]:
        """The named outputs."""


def threads() -> int:
    """PyTorch's number where it is loaded, for comparable speeds; else OMP_NUM_THREADS; 0 leaves it to the runtime."""
    if (torch := sys.modules.get("torch")) is not None:
        return int(torch.get_num_threads())
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return int(wanted) if wanted.isdecimal() else 0
