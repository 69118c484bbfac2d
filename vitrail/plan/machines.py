"""The machines to plan for: a table of GPUs from their data sheets, and the machine that this program runs on."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace

import torch

from vitrail.device import choose_device, hardware
from vitrail.errors import UserError, nearest

GB = 10**9
UTILISATION = 0.4  # assumed share of the peak rate; 0.3 to 0.5 is usual for a ViT in mixed precision


@dataclass(frozen=True)
class Machine:
    """One device or several of a kind."""

    name: str
    memory: float  # bytes of a device
    peak: dict[str, float]  # operations per second of a device, by --amp; empty for a device that is measured
    watts: float | None = None  # of a device
    count: int = 1
    device: str = "cpu"  # on which torch measures, if there is no peak

    @property
    def title(self) -> str:
        return self.name if self.count == 1 else f"{self.count} x {self.name}"


def _gpu(name: str, memory: float, half: float, single: float, watts: float, bf16: bool = True) -> Machine:
    """Memory in GB, rates in 10^12 operations per second: half precision on tensor cores, and fp32."""
    peak = {"off": single * 1e12, "fp16": half * 1e12} | ({"bf16": half * 1e12} if bf16 else {})
    return Machine(name, memory * GB, peak, watts)


# From the vendors' data sheets: dense rates (without sparsity), with fp32 accumulation; the board's maximum power.
# torch does not use TF32 unless asked, so fp32 is the plain rate.
GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("T4", 16, 65, 8.1, 70, bf16=False),
        _gpu("V100", 16, 125, 15.7, 300, bf16=False),
        _gpu("V100-32GB", 32, 125, 15.7, 300, bf16=False),
        _gpu("RTX3090", 24, 71, 35.6, 350),
        _gpu("RTX4090", 24, 165.2, 82.6, 450),
        _gpu("RTX5090", 32, 209.5, 104.8, 575),
        _gpu("A10", 24, 125, 31.2, 150),
        _gpu("A30", 24, 165, 10.3, 165),
        _gpu("A40", 48, 149.7, 37.4, 300),
        _gpu("L4", 24, 121, 30.3, 72),
        _gpu("L40S", 48, 362, 91.6, 350),
        _gpu("A100-40GB", 40, 312, 19.5, 400),
        _gpu("A100", 80, 312, 19.5, 400),
        _gpu("H100", 80, 989, 67, 700),
        _gpu("H200", 141, 989, 67, 700),
        _gpu("B200", 180, 2250, 75, 1000),
        _gpu("MI250X", 128, 383, 47.9, 560),
        _gpu("MI300X", 192, 1307, 163.4, 750),
    )
}


def machine(device: str | None = None, devices: str | None = None) -> Machine:
    """The machine of --device, a known GPU or a device of this machine, or of --devices, as in 8xA100."""
    if device is not None and devices is not None:
        raise UserError("--device and --devices both choose the machine. Remove one of them.")
    if devices is None:
        name = None if device is None else _known(device)
        return GPUS[name] if name else _here(device)
    match = re.fullmatch(r"(\d+) ?[xX×*] ?(.+)", devices)
    if match is None or not int(match[1]):
        raise UserError(f"'devices' must be a number of GPUs and their name, as in 8xA100, but it is '{devices}'.")
    name = _known(match[2])
    if name is None:
        raise UserError(f"There is no GPU '{match[2]}' in the table.{nearest(match[2], GPUS)} {_list()}")
    return replace(GPUS[name], count=int(match[1]))


def _known(name: str) -> str | None:
    """The GPU of the table with this name, however it is spelled."""

    def bare(text: str) -> str:
        return re.sub(r"[^a-z0-9]", "", text.lower()).removeprefix("nvidia").removesuffix("gb")

    spelled = {bare(gpu): gpu for gpu in GPUS} | {"a10080": "A100", "h10080": "H100", "v10016": "V100"}
    return spelled.get(bare(name))


def _here(device: str | None) -> Machine:
    """The machine that this program runs on."""
    try:
        chosen = choose_device(device)
    except UserError as error:
        raise UserError(f"{error}{nearest(str(device), GPUS)} {_list()}") from None
    return Machine(hardware(chosen), _memory(chosen), {}, device=chosen)


def _memory(device: str) -> float:
    if device.startswith("cuda"):
        return float(torch.cuda.mem_get_info(device)[1])
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _list() -> str:
    return f"Known GPUs are {', '.join(GPUS)}; cpu, cuda and mps are measured."
