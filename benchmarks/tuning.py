"""Time and memory of a fine-tuning step: all weights, part of them, LoRA adapters, or the head only.

    python benchmarks/tuning.py

ViT-S/16 at 96 pixels, batch size 32, AdamW, one thread. Each method runs in its own process: CPU time of the fastest
of six steps, peak memory beyond the program and the weights.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time

import torch

from vitrail.config import TransferConfig
from vitrail.device import keep_freed_memory
from vitrail.models import create
from vitrail.train.transfer import set_learning, set_mode

METHODS = {
    "none: all parameters": TransferConfig(),
    "`--lora-rank 8`": TransferConfig(lora_rank=8, lora_alpha=16.0),
    "`--freeze 6`": TransferConfig(freeze=6),
    "`--freeze all`": TransferConfig(freeze="all"),
}


def measure(transfer: TransferConfig) -> tuple[float, float]:
    """Seconds per step, and MiB beyond the weights."""
    torch.set_num_threads(1)
    keep_freed_memory()
    model = create("vit_s16", img_size=96, classes=10)
    set_learning(model, transfer)
    set_mode(model)
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    images = torch.randn(32, 3, 96, 96)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(6):
        begun = time.process_time()
        model(images).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.process_time() - begun)
    return min(seconds), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main() -> None:
    if len(sys.argv) > 1:
        print(*measure(METHODS[sys.argv[1]]))
        return
    results = {}
    for method in METHODS:
        output = subprocess.run([sys.executable, __file__, method], check=True, capture_output=True, text=True).stdout
        results[method] = [float(number) for number in output.split()]
    first = results["none: all parameters"]
    print("| flag | time per step | memory |\n|---|---|---|")
    for method, (seconds, memory) in results.items():
        print(f"| {method} | {seconds:.2f} s, {seconds / first[0]:.0%} | {memory:.0f} MiB, {memory / first[1]:.0%} |")


if __name__ == "__main__":
    main()
