"""The torch device to run on, its autocast precision and its name; freed memory."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F

from vitrail.errors import UserError
from vitrail.world import started

Precision = Literal["off", "bf16", "fp16"]


def choose_device(requested: str | None) -> str:
    """The requested device, or by default the first available of CUDA, MPS and CPU."""
    if requested is None:
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    requested = device_name(requested)
    if started() > 1 and requested.startswith("cuda:"):
        raise UserError(f"Under torchrun, each process takes the GPU of its number. Remove --device {requested}.")
    try:
        torch.empty(0, device=requested)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise UserError(f"The device '{requested}' cannot be used: {reason}.") from error
    return requested


def device_name(text: str) -> str:
    """A device as torch names it: 0 is cuda:0."""
    if re.fullmatch(r"\d+(\s*,\s*\d+)+", text):
        raise UserError(
            f"A process uses one device, but --device is {text}. Choose one, such as cuda:{text[0]}, or start the "
            f"command with torchrun: torchrun --nproc-per-node {text.count(',') + 1} -m vitrail train …"
        )
    return f"cuda:{text}" if text.isascii() and text.isdigit() else text


def choose_precision(device: str) -> Precision:
    """The default autocast precision of a device.

    On CUDA bf16 or fp16; on a CPU bf16 if it has instructions for it and they prove faster; else off.
    """
    if device.startswith("cuda"):
        return "bf16" if torch.cuda.is_bf16_supported() else "fp16"
    return "bf16" if device == "cpu" and has_bf16() and _bf16_speedup() >= 1.2 else "off"


def has_bf16() -> bool:
    """Whether the CPU has bf16 instructions. Without them, torch computes in bf16 too, but five times slower."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


@cache
def _bf16_speedup() -> float:
    """How many times as fast a linear layer is in bf16 as in fp32: a measurement of some 100 ms."""
    layers = [
        (torch.ones(1024, 384, dtype=dtype), torch.ones(1536, 384, dtype=dtype))
        for dtype in (torch.float32, torch.bfloat16)
    ]
    rounds = []
    for _ in range(12):  # in turn, so that other programs slow down both; the fastest turns are the least disturbed
        turns = []
        for layer in layers:
            begun = time.perf_counter()
            F.linear(*layer)
            turns.append(time.perf_counter() - begun)
        rounds.append(turns)
    single, half = map(min, zip(*rounds, strict=True))
    return single / half


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


def memory() -> int | None:
    """The bytes of memory that this process may use, by the machine and its cgroup; None where that is unknown."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # no cgroup, or no limit
            total = min(total, int(Path(file).read_text(encoding="ascii")))
    return total


def keep_freed_memory() -> None:
    """Makes glibc keep large freed blocks instead of returning them to the kernel; a no-op elsewhere.

    The kernel zeroes every page it hands out, which costs time in every step: Ti/16 predicts 1.3 times as fast with
    kept memory.
    """
    trim_threshold, mmap_max = -1, -4  # as in malloc.h
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, 2**31 - 1)
