"""Which parameter learns how fast: groups, optimisers, the schedule, and the moving average of the weights."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Muon, Optimizer

from vitrail.config import OptimConfig
from vitrail.models import Model
from vitrail.train.lamb import Lamb
from vitrail.train.lora import adapters


def build_optimizers(model: Model, config: OptimConfig, pretrained: bool) -> list[Optimizer]:
    """One optimiser, or with Muon two: Muon for the matrices of the encoder, AdamW for everything else.

    They hold what learns and nothing else: where no matrix does, Muon has nothing to do and is left out. Muon's
    updates are scaled to the size of AdamW's, so that both share a learning rate.
    """
    matrices, others = parameter_groups(model, config, pretrained)
    if config.opt == "sgd":
        return [SGD(matrices + others, lr=config.lr, momentum=0.9)]
    if config.opt == "adamw" or (config.opt == "muon" and not matrices):
        return [AdamW(matrices + others, lr=config.lr)]
    if config.opt == "lamb":
        return [Lamb(matrices + others, lr=config.lr)]
    muon = Muon(matrices, lr=config.lr, adjust_lr_fn="match_rms_adamw")
    return [muon, AdamW(others, lr=config.lr)]


def parameter_groups(
    model: Model, config: OptimConfig, pretrained: bool
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Groups of the encoder's matrices and of all other parameters, by learning rate and weight decay.

    Stages far from the head learn slower by `layer_decay` each; with pre-trained weights all but the head learn
    slower by `body_lr`. Adapters are as new as a head, and learn as fast. Norms, biases, tokens, positions and
    adapters are not decayed: only tensors called "weight" are.
    """
    stages = model.stages()
    depth = {p: i for i, stage in enumerate(stages) for p in stage.parameters()}
    last = len(stages) - 1
    added = set(adapters(model))
    matrices: dict[tuple[float, float], list[nn.Parameter]] = defaultdict(list)
    others: dict[tuple[float, float], list[nn.Parameter]] = defaultdict(list)
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        body = config.body_lr if pretrained and depth[p] < last else 1.0
        scale = 1.0 if p in added else config.layer_decay ** (last - depth[p]) * body
        decays = p.ndim >= 2 and name.endswith("weight")
        inside = 0 < depth[p] < last and p.ndim == 2
        kind = matrices if decays and inside else others
        kind[scale, config.weight_decay if decays else 0.0].append(p)
    return _groups(matrices), _groups(others)


def _groups(members: dict[tuple[float, float], list[nn.Parameter]]) -> list[dict[str, Any]]:
    return [{"params": p, "scale": scale, "weight_decay": decay} for (scale, decay), p in members.items()]


def set_lr(optimizers: Iterable[Optimizer], lr: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr * group["scale"]


def lr_at(step: float, steps: int, warmup: int, config: OptimConfig) -> float:
    """The learning rate of optimiser step `step` of `steps`: linear warm-up, then the decay of `sched`."""
    if step < warmup:
        return config.lr * (step + 1) / warmup
    progress = (step - warmup) / max(steps - warmup, 1)
    if config.sched == "cosine":
        height = 0.5 * (1 + math.cos(math.pi * progress))
    elif config.sched == "linear":
        height = 1 - progress
    else:
        height = min(1.0, (steps - step) / max(config.cooldown * steps, 1))
    return config.lr * (config.min_lr + (1 - config.min_lr) * height)


class Ema:
    """An exponential moving average of a model's weights: usually a better model than the last step's.

    The average of the last iterates of Polyak and Juditsky, as the ViT paper has it. In a run too short for the decay
    it covers about the last tenth of the steps so far, where the decay alone would keep the untrained weights: after
    500 steps of 0.9999, 95 % of them.
    """

    def __init__(self, model: Model, decay: float):
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model: Model, step: int) -> None:
        """Averages in the weights after optimiser step `step`; the first steps count for more."""
        decay = min(self.decay, (1 + step) / (10 + step))
        pairs = zip(self.model.parameters(), model.parameters(), strict=True)
        averages, weights = zip(*[(average, p) for average, p in pairs if p.requires_grad], strict=True)
        torch._foreach_lerp_(averages, weights, 1 - decay)
