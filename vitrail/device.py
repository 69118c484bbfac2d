"""Where tensors live: the device that was asked for, or the best one there is."""

from __future__ import annotations

from typing import Literal

import torch

from vitrail.errors import UserError

Precision = Literal["off", "bf16", "fp16"]


def choose_device(asked: str | None) -> str:
    """`asked` if it can be used, else a UserError; without a wish CUDA, Apple's MPS or the CPU."""
    if asked is None:
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        torch.empty(0, device=asked)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"The device '{asked}' cannot be used: {str(error).splitlines()[0].rstrip('.')}.") from error
    return asked


def choose_precision(device: str) -> Precision:
    """The autocast precision that pays on a device: bf16 or fp16 on CUDA, none elsewhere."""
    if not device.startswith("cuda"):
        return "off"
    return "bf16" if torch.cuda.is_bf16_supported() else "fp16"
