"""LAMB: Adam with each matrix's step scaled to the norm of the matrix, for large batches.

https://arxiv.org/abs/1904.00962. As in NVIDIA's and timm's versions, parameters without weight decay (norms,
biases, tokens) take Adam's plain step. The gradient is clipped in the loop, not here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer


class Lamb(Optimizer):
    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            slow, slower = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {"step": 0, "mean": torch.zeros_like(p), "square": torch.zeros_like(p)}
                state["step"] += 1
                mean = state["mean"].lerp_(p.grad, 1 - slow) / (1 - slow ** state["step"])
                square = state["square"].lerp_(p.grad.square(), 1 - slower) / (1 - slower ** state["step"])
                update = mean / (square.sqrt() + group["eps"])
                if group["weight_decay"]:
                    update += group["weight_decay"] * p
                    length, wanted = update.norm(), p.norm()
                    # A matrix of zeros, such as a fresh head, would never move.
                    update *= torch.where((length > 0) & (wanted > 0), wanted / length, 1.0)
                p -= group["lr"] * update
