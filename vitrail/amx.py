"""Avoids AMX on virtual machines that announce it but do not describe its tiles.

oneDNN, inside torch and OpenVINO, configures the tiles as leaf 0x1D of CPUID describes them. Some hypervisors hide that
leaf, but not the feature: then the first product in bf16 or int8 ends the process with SIGILL.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from pathlib import Path

_TILES = 0x1D
# (leaf, subleaf) -> eax: mov eax, edi; mov ecx, esi; push rbx; cpuid; pop rbx; ret
_CPUID = bytes.fromhex("89f8 89f1 53 0fa2 5b c3")


def avoid_broken_amx() -> None:
    """Limits oneDNN to the instruction set below AMX where AMX cannot work, unless the user has chosen one."""
    if _announced() and not _described():
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")


def _announced(cpuinfo: str = "/proc/cpuinfo") -> bool:
    if platform.machine() != "x86_64":
        return False
    try:
        with Path(cpuinfo).open(encoding="utf-8", errors="replace") as lines:
            return any("amx_tile" in line.split() for line in lines if line.startswith("flags"))
    except OSError:  # not Linux
        return False


def _described() -> bool:
    """Whether CPUID has at least one palette of tiles; also if it cannot be asked."""
    try:
        page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError:  # security policies refuse memory that is writable and executable
        return True
    page.write(_CPUID)
    cpuid = ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint32)(
        ctypes.addressof(ctypes.c_char.from_buffer(page))
    )
    return cpuid(0, 0) >= _TILES and cpuid(_TILES, 0) >= 1
