"""Where tensors live: the device that was asked for, or the best one there is."""

from __future__ import annotations

import platform
from pathlib import Path
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


def hardware(device: str) -> str:
    """What a device is, as people call it: the graphics card, or the processor and the threads that torch uses."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    facts = Path("/proc/cpuinfo")  # Linux only, where `platform` knows no names
    lines = facts.read_text(encoding="utf-8", errors="replace").splitlines() if facts.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = next(filter(None, names), platform.processor() or platform.machine())
    threads = torch.get_num_threads()
    return f"{name}, {threads} {'thread' if threads == 1 else 'threads'}{', MPS' if device == 'mps' else ''}"
