"""The objective of a run: its task's, with the decoder of its weights; wrapped in distillation if it has a teacher."""

from __future__ import annotations

from vitrail.config import TrainConfig
from vitrail.data.dataset import Targets
from vitrail.models import Model
from vitrail.progress import log
from vitrail.tasks.objective import Objective
from vitrail.train.distill import Distilled
from vitrail.train.progress import Progress
from vitrail.train.teacher import Teacher
from vitrail.weights import Card
from vitrail.weights.added import load_added


def build_objective(model: Model, card: Card, config: TrainConfig, targets: Targets, progress: Progress) -> Objective:
    """The objective of a run, for training images with these targets."""
    objective = card.task.objective(model, config, targets)
    if config.weights is not None and objective.added():
        log.info(f"From {config.weights}: {load_added(config.weights, objective, card.task.title)}.")
    if config.distillation.teacher is None:
        return objective
    teacher = Teacher(config.distillation, card, config.run.device)
    return Distilled(objective, teacher, config.distillation, progress)
