"""The objective of a run: that of its task, wrapped in distillation if there is a teacher."""

from __future__ import annotations

import torch

from vitrail.config import TrainConfig
from vitrail.data.balance import class_weights
from vitrail.data.dataset import Targets
from vitrail.models import Model
from vitrail.tasks.objective import MultiClass, MultiLabel, Objective, Regression
from vitrail.train.distill import Distilled
from vitrail.train.progress import Progress
from vitrail.train.teacher import Teacher
from vitrail.weights import Card


def build_objective(model: Model, card: Card, config: TrainConfig, targets: Targets, progress: Progress) -> Objective:
    """What a run minimises, for training images with these targets."""
    objective = _task_objective(model, card, config, targets)
    if config.distillation.teacher is None:
        return objective
    teacher = Teacher(config.distillation, card, config.run.device)
    return Distilled(objective, teacher, config.distillation, progress)


def _task_objective(model: Model, card: Card, config: TrainConfig, targets: Targets) -> Objective:
    weights, ema = None, config.optim.model_ema
    if config.source.class_weights:
        weights = torch.from_numpy(class_weights(targets, len(card.classes))).to(config.run.device)
    if card.task == "multilabel":
        return MultiLabel(model, weights, ema)
    if card.task == "regression":
        return Regression(model, card.target_mean, card.target_std, ema).to(config.run.device)
    return MultiClass(model, config.optim.loss, weights, config.augment.smoothing, ema)
