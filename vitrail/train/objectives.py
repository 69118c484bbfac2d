"""The objective of a run: its task's or the caller's, wrapped in distillation if it has a teacher."""

from __future__ import annotations

from torch import Tensor

from vitrail.config import DistillConfig, TrainConfig
from vitrail.data.dataset import Targets
from vitrail.models import Model
from vitrail.progress import log
from vitrail.tasks.objective import Objective
from vitrail.train.custom import NOTHING, Custom, Loss
from vitrail.train.distill import Distilled
from vitrail.train.progress import Progress
from vitrail.train.teacher import Teacher
from vitrail.weights import Card
from vitrail.weights.added import load_added


def build_objective(
    model: Model, card: Card, config: TrainConfig, targets: Targets, progress: Progress, custom: Custom = NOTHING
) -> Objective:
    """The objective of a run, for training images with these targets: the task's, or the caller's."""
    objective = card.task.objective(model, config, targets)
    if isinstance(custom.objective, type):
        objective = custom.objective(model, config.optim.model_ema)
    elif custom.objective is not None:
        objective = OwnLoss(objective, custom.loss)
    if config.weights is not None and objective.added():
        log.info(f"From {config.weights}: {load_added(config.weights, objective, card.task.title)}.")
    if config.distillation.teacher is None:
        return objective
    teacher = Teacher(config.distillation, card, config.run.device)
    return Distilled(objective, teacher, config.distillation, progress)


class OwnLoss(Objective):
    """A task's objective with the caller's loss in place of its own."""

    def __init__(self, task: Objective, loss: Loss):
        super().__init__(task.model)
        self.ema = task.ema
        self.task = task
        self.loss = loss

    def compare(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss(outputs, self.task.aims(targets))

    def show(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return self.task.show(outputs, targets)

    def lesson(self, outputs: Tensor, taught: Tensor, how: DistillConfig) -> dict[str, Tensor]:
        return self.task.lesson(outputs, taught, how)
