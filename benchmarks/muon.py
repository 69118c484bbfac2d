"""A training step of `vit_nano8` with vitrail's Muon and with torch's.

    python benchmarks/muon.py

32-pixel images, batch size 128, forward and backward pass, clipping and optimiser. Steps alternate; medians of 30.
"""

from __future__ import annotations

import os

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as in the vitrail command, before torch is imported

import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn

from vitrail.config import OptimConfig
from vitrail.device import hardware, keep_freed_memory
from vitrail.models import create
from vitrail.train.muon import Muon
from vitrail.train.optim import build_optimizers, parameter_groups

STEPS = 30
OPTIM = OptimConfig(epochs=1, batch_size=128, opt="muon", lr=1e-3, weight_decay=0.05, sched="linear", warmup_epochs=0.0)


def optimizers(model: nn.Module, theirs: bool) -> list[torch.optim.Optimizer]:
    ours = build_optimizers(model, OPTIM, pretrained=False)
    if not theirs:
        return ours
    matrices, _ = parameter_groups(model, OPTIM, pretrained=False)
    return [torch.optim.Muon(matrices, lr=OPTIM.lr, adjust_lr_fn="match_rms_adamw"), ours[1]]


def main() -> None:
    keep_freed_memory()
    images, labels = torch.randn(128, 3, 32, 32), torch.randint(10, (128,))
    contestants = {}
    for name in ("vitrail", "torch"):
        model = create("vit_nano8", classes=10)
        contestants[name] = (model, optimizers(model, name == "torch"))
    assert isinstance(contestants["vitrail"][1][0], Muon)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    of_muon: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(STEPS + 2):
        for name, (model, learners) in contestants.items():
            begun = time.perf_counter()
            F.cross_entropy(model(images), labels).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            before = time.perf_counter()
            learners[0].step()
            of_muon[name].append(time.perf_counter() - before)
            learners[1].step()
            model.zero_grad()
            seconds[name].append(time.perf_counter() - begun)
    print(hardware("cpu"))
    for name in contestants:
        step, muon = (1000 * statistics.median(times[name][2:]) for times in (seconds, of_muon))
        print(f"{name:<8} {step:6.1f} ms per step, of which Muon {muon:5.1f} ms")


if __name__ == "__main__":
    main()
