"""What a training loop needs besides data: the objective, its optimisers, the gradient scaler and the precision."""

from __future__ import annotations

from functools import partial

import torch
from torch.optim import Optimizer

from vitrail.config import TrainConfig
from vitrail.data.dataset import Targets
from vitrail.models import Model
from vitrail.tasks.objective import Objective
from vitrail.train.custom import NOTHING, Custom
from vitrail.train.objectives import build_objective
from vitrail.train.optim import build_optimizers
from vitrail.train.progress import Progress
from vitrail.train.recompute import recompute_activations
from vitrail.train.seeds import derive
from vitrail.weights import Card
from vitrail.world import World


def set_up(
    model: Model,
    card: Card,
    config: TrainConfig,
    targets: Targets,
    progress: Progress,
    world: World,
    custom: Custom = NOTHING,
) -> tuple[Objective, list[Optimizer], torch.amp.GradScaler]:
    """What `steps` needs besides data, to train a model on images with these targets."""
    torch.manual_seed(derive(config.run.seed, 0, 2))  # initial weights of what the objective adds, such as a decoder
    objective = build_objective(model.to(config.run.device), card, config, targets, progress, custom)
    objective.to(config.run.device)
    if config.run.grad_checkpointing:
        recompute_activations(model)  # after the moving average was copied from the model
    if config.run.compile:
        objective.compile()
    world.shard(objective, config.run.shard, torch.bfloat16 if config.run.amp == "bf16" else None)
    added = objective.added().values()
    optimizers = build_optimizers(model, config.optim, config.weights is not None, added, custom)
    return objective, optimizers, torch.amp.GradScaler(config.run.device, enabled=config.run.amp == "fp16")


def autocast(config: TrainConfig) -> partial[torch.autocast]:
    """The context of a forward pass in the run's precision."""
    precision = torch.bfloat16 if config.run.amp == "bf16" else torch.float16
    return partial(torch.autocast, torch.device(config.run.device).type, precision, enabled=config.run.amp != "off")
