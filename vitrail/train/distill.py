"""Knowledge distillation from labels and a teacher's outputs, as in DeiT: https://arxiv.org/abs/2012.12877."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vitrail.config import DistillConfig, TrainConfig
from vitrail.data.augment import is_deterministic
from vitrail.data.dataset import Split
from vitrail.tasks.objective import Batch, Objective
from vitrail.train.progress import Progress
from vitrail.train.teacher import Teacher
from vitrail.weights import Card


class Distilled(Objective):
    """A task's objective that also learns from a teacher.

    In a model with a distillation token, the class token learns the labels and the distillation token the teacher,
    each through its own head; any other model learns both through its one head. Smoothing and class weights apply to
    the labels only. The teacher's time is reported to `progress`.
    """

    def __init__(self, task: Objective, teacher: Teacher, how: DistillConfig, progress: Progress):
        super().__init__(task.model)
        self.ema = task.ema
        self.task = task
        self.teacher = teacher
        self.how = how
        self._progress = progress

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        taught = self._ask(batch)
        outputs = [logits.float() for logits in self.model.heads(batch.images)]
        labelled, distilled = outputs[0], outputs[-1]
        lesson, alpha = self.task.lesson(distilled, taught, self.how), self.how.distill_alpha
        loss = (1 - alpha) * self.task.compare(labelled, batch.targets) + alpha * lesson.pop("loss")
        return {"loss": loss, **self.task.show(labelled + distilled, batch.targets), **lesson}

    def parts(self) -> dict[str, Any]:
        return super().parts() | {"teacher": self.teacher}

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # it is timed, and may run ONNX
    def _ask(self, batch: Batch) -> Tensor:
        with self._progress.teaching():
            return self.teacher(batch.images, batch.numbers)


def introduce_teacher(
    objective: Objective, card: Card, config: TrainConfig, val: Split, train: Split, progress: Progress, over: bool
) -> Card:
    """Measures the teacher on the validation images and returns the card with its name and scores.

    Where images are never augmented, its outputs for all training images are computed here, once, unless the run is
    `over`. The time counts towards the run's budget but not towards its steps. Without a teacher nothing happens.
    """
    if not isinstance(objective, Distilled):
        return card
    teacher, workers = objective.teacher, config.source.workers
    card = replace(card, teacher=teacher.introduce(val, workers))
    if is_deterministic(config.augment) and "augment" not in (config.python or ()) and not over:
        teacher.answer_once(train, workers)
    progress.prepared += progress.tick()
    return card
