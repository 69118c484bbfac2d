"""DINO: self-distillation without labels, https://arxiv.org/abs/2104.14294.

A student sees all views, a teacher the global ones. The student learns the teacher's distribution over prototypes for
the other views; the teacher is the moving average of the student. Centring and sharpening of the teacher's outputs
prevent collapse: if all outputs become uniform, the loss stays at the logarithm of the number of prototypes.

Legend: B batch, V global views, L local views, F features, K prototypes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vitrail.charts.measure import Measure, number
from vitrail.config import TrainConfig
from vitrail.models import Model, ModelConfig
from vitrail.models.ema import Ema
from vitrail.models.projection import DinoHead
from vitrail.tasks import register
from vitrail.tasks.multicrop import MultiCrop, MultiCropObjective
from vitrail.tasks.objective import Batch, Objective
from vitrail.tasks.pretraining import FeatureScores
from vitrail.tasks.scores import Targets
from vitrail.tasks.task import Health
from vitrail.world import world

_STUDENT = 0.1  # temperature
_CENTRE = 0.9  # momentum
_FROZEN = 0.1  # of a run, at most, in which the last layer does not learn
_UNIFORM, _PEAKED = 0.99, 0.01  # entropies of a collapsed teacher: as a share of the largest, and in nats


@register
@dataclass(frozen=True)
class Dino(MultiCrop):
    name: ClassVar[str] = "dino"
    title: ClassVar[str] = "DINO"
    logged: ClassVar[tuple[Measure, ...]] = (
        Measure(
            "entropy",
            "teacher entropy",
            "how evenly the teacher uses the prototypes for an image, in nats; near the maximum or 0 it has collapsed",
            heading="Entropy of the teacher",
        ),
    )

    def levels(self, config: TrainConfig) -> dict[str, tuple[str, float]]:
        assert config.pretraining.prototypes is not None
        count = config.pretraining.prototypes
        return super().levels(config) | {"entropy": (f"uniform: ln {count}", math.log(count))}

    def health(self, scores: FeatureScores, means: Mapping[str, float], config: TrainConfig) -> Health:
        name, uniform = self.levels(config)["entropy"]
        reached = means.get("entropy", 1.0)
        if reached > _UNIFORM * uniform:
            sentence = (
                f"The teacher has collapsed to the uniform distribution: its entropy is {reached:.2f} ({name} = "
                f"{uniform:.2f}). Lower --teacher-temp or --lr."
            )
            return Health(False, sentence, "uniform teacher")
        if reached < _PEAKED:
            sentence = (
                f"The teacher has collapsed to few prototypes: its entropy is {number(reached, 2)}. Raise "
                "--teacher-temp, or lower --lr."
            )
            return Health(False, sentence, "peaked teacher")
        return super().health(scores, means, config)

    @classmethod
    def small(cls, config: ModelConfig) -> dict[str, Any]:
        return super().small(config) | {"prototypes": 1024, "teacher_momentum": 0.99, "teacher_temp": 0.04}

    def objective(self, model: Model, config: TrainConfig, targets: Targets) -> Objective:
        optim = config.optim
        per_epoch = max(len(targets) // optim.batch_size, 1)
        return DinoObjective(model, config, per_epoch)


class DinoObjective(MultiCropObjective):
    """Cross-entropy between the teacher's and the student's distributions, over all pairs of different views.

    `kept` is the teacher. The last layer does not learn in the first `per_epoch` steps, as published, but at most in a
    tenth of the run. The momentum of the teacher grows to 1 over the run.
    """

    centre: Tensor

    def __init__(self, model: Model, config: TrainConfig, per_epoch: int):
        super().__init__(model, config, ema=0.0)
        how = config.pretraining
        assert how.prototypes is not None
        assert how.teacher_momentum is not None
        assert how.teacher_temp is not None
        assert how.head_width is not None
        self.head = DinoHead(model.config.features, how.prototypes, how.head_width)
        self.teacher = Ema(model, how.teacher_momentum)
        self.teacher_head = copy.deepcopy(self.head).requires_grad_(False)
        self.register_buffer("centre", torch.zeros(how.prototypes))
        self.momentum, self.temperature = how.teacher_momentum, how.teacher_temp
        self.steps = per_epoch * config.optim.epochs
        self.frozen = min(per_epoch, int(_FROZEN * self.steps))  # steps in which the last layer does not learn
        self._step = 0

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        with torch.no_grad():
            taught = self.teacher_head(self.teacher.model.embed(batch.images)).float()
            targets = self.sharpened(taught)
            self.centre.lerp_(world().average(taught.mean(dim=0)), 1 - _CENTRE)
        logits = self.head(self.features(batch), frozen=self._step < self.frozen).float()
        loss = cross_view(targets.view(self.views, -1, targets.shape[1]), logits)
        return {"loss": loss, "entropy": entropy(targets).mean()}

    def sharpened(self, logits: Tensor) -> Tensor:
        """The teacher's distribution: centred, and sharpened by a low temperature."""
        return ((logits - self.centre) / self.temperature).softmax(dim=-1)

    def losses(self, features: Tensor) -> Tensor:
        logits = self.teacher_head(features).float()
        targets = self.sharpened(logits)
        first, second = logits.div(_STUDENT).log_softmax(dim=-1)
        return -((targets[1] * first).sum(dim=-1) + (targets[0] * second).sum(dim=-1)) / 2

    def after_step(self, step: int) -> None:
        """Moves the teacher towards the student; its momentum grows to 1 along a half cosine."""
        done = min(step / max(self.steps, 1), 1.0)
        self.teacher.decay = 1 - (1 - self.momentum) * (1 + math.cos(math.pi * done)) / 2
        self.teacher.update(self.model, step)
        with torch.no_grad():
            mine, theirs = ([*map(world().local, head.parameters())] for head in (self.teacher_head, self.head))
            torch._foreach_lerp_(mine, theirs, 1 - min(self.teacher.decay, (1 + step) / (10 + step)))
        self._step = step + 1

    def kept(self) -> Model:
        return self.teacher.model

    def added(self) -> dict[str, nn.Module]:
        return {"head": self.head}

    def followers(self) -> dict[str, nn.Module]:
        return {"head": self.teacher_head}

    def parts(self) -> dict[str, Any]:
        state = {"kept": self.teacher.model, "teacher_head": self.teacher_head, "centre": _Centre(self)}
        return super().parts() | state


class _Centre:
    """The centre and the step, as state of a checkpoint."""

    def __init__(self, objective: DinoObjective):
        self._objective = objective

    def state_dict(self) -> dict[str, Any]:
        return {"centre": self._objective.centre, "step": self._objective._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._objective.centre.copy_(state["centre"])
        self._objective._step = state["step"]


def cross_view(targets: Tensor, logits: Tensor) -> Tensor:
    """The mean cross-entropy of the student's logits, (V + L, B, K), for the teacher's targets, (V, B, K).

    Pairs of the same view are left out.
    """
    student = logits.div(_STUDENT).log_softmax(dim=-1)
    terms = [
        -(target * other).sum(dim=-1).mean()
        for i, target in enumerate(targets)
        for j, other in enumerate(student)
        if i != j
    ]
    return torch.stack(terms).mean()


def entropy(distribution: Tensor) -> Tensor:
    """The entropy of distributions, (…, K), in nats."""
    return torch.special.entr(distribution).sum(dim=-1)
