"""The torch device to run on, its autocast precision and its name."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Literal

import torch

from vitrail.errors import UserError

Precision = Literal["off", "bf16", "fp16"]


def choose_device(requested: str | None) -> str:
    """The requested device, or by default the first available of CUDA, MPS and CPU."""
    if requested is None:
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        torch.empty(0, device=requested)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise UserError(f"The device '{requested}' cannot be used: {reason}.") from error
    return requested


def choose_precision(device: str) -> Precision:
    """The default autocast precision of a device: bf16 or fp16 on CUDA, off elsewhere."""
    if not device.startswith("cuda"):
        return "off"
    return "bf16" if torch.cuda.is_bf16_supported() else "fp16"


def hardware(device: str) -> str:
    """The name of the GPU, or of the CPU with torch's number of threads."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")  # on Linux `platform.processor()` does not give the model name
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = next(filter(None, names), platform.processor() or platform.machine())
    threads = torch.get_num_threads()
    return f"{name}, {threads} {'thread' if threads == 1 else 'threads'}{', MPS' if device == 'mps' else ''}"
