"""The number of threads that ONNX Runtime and OpenVINO compute with."""

from __future__ import annotations

import os
import sys


def threads() -> int:
    """PyTorch's number where it is loaded, for comparable speeds; else OMP_NUM_THREADS; 0 leaves it to the runtime."""
    if (torch := sys.modules.get("torch")) is not None:
        return int(torch.get_num_threads())
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return int(wanted) if wanted.isdecimal() else 0
