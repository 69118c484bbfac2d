"""Muon: momentum whose update is orthogonalised, for weight matrices (https://kellerjordan.github.io/posts/muon/).

The mathematics and the state are those of `torch.optim.Muon`, which orthogonalises one matrix at a time in bf16. Here
matrices of one shape are orthogonalised together, and in fp32 on CPUs: without bf16 hardware, torch's version takes
38 % of a training step of `vit_nano8`, and this one a quarter of that time (benchmarks/muon.py).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from vitrail.world import world

MOMENTUM = 0.95
STEPS = 5  # of Newton-Schulz
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of its polynomial, chosen for speed: singular values end near 1, not at 1


class Muon(torch.optim.Muon):
    """Muon with Nesterov momentum; updates have the root mean square of AdamW's, so both share a learning rate."""

    def __init__(self, params: Iterable[dict[str, Any]], lr: float):
        super().__init__(params, lr=lr, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            if not weights:
                continue
            grads = [p.grad for p in weights]
            for p in weights:
                if not self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            momenta = [self.state[p]["momentum_buffer"] for p in weights]
            torch._foreach_lerp_(momenta, grads, 1 - MOMENTUM)
            # A matrix is orthogonalised as a whole, of which a process keeps its shard.
            changes = torch._foreach_lerp(grads, momenta, MOMENTUM)
            whole = orthogonalise(world().whole(change) for change in changes)
            updates = [world().like(update, p) for update, p in zip(whole, weights, strict=True)]
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_mul_(updates, [-0.2 * group["lr"] * math.sqrt(max(p.shape)) for p in weights])
            torch._foreach_add_(weights, updates)


def orthogonalise(matrices: Iterable[Tensor]) -> list[Tensor]:
    """The nearest semi-orthogonal matrices, approximately: all singular values between about 0.7 and 1.2."""
    matrices = list(matrices)
    batches: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, matrix in enumerate(matrices):
        rows, columns = matrix.shape
        batches[min(rows, columns), max(rows, columns)].append(number)
    results = list(matrices)
    for numbers in batches.values():
        wide = torch.stack([m if m.shape[0] <= m.shape[1] else m.T for m in (matrices[n] for n in numbers)])
        for number, result in zip(numbers, _newton_schulz(wide), strict=True):
            tall = matrices[number].shape[0] > matrices[number].shape[1]
            results[number] = (result.T if tall else result).to(matrices[number].dtype)
    return results


def _newton_schulz(x: Tensor) -> Tensor:
    """Newton-Schulz on a batch of wide matrices, (B, R, C)."""
    a, b, c = COEFFICIENTS
    x = x.bfloat16() if x.is_cuda else x.float()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)  # no singular value above 1
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x
