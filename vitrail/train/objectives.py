"""What is learnt: a module that takes a batch and returns its loss and what else to show.

Targets come as mixing and label smoothing make them: (B, K) shares of classes, chances of labels, or numbers.
A teacher's outputs, (B, K) too, are a third input where there is a teacher.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import TrainConfig
from vitrail.data.balance import class_weights
from vitrail.data.dataset import Targets
from vitrail.models import Model
from vitrail.weights import Card

Loss = Literal["ce", "bce"]
Distill = Literal["hard", "soft"]


class MultiClass(nn.Module):
    """Cross-entropy: one class fits an image. With `weights`, (K,), every class has its own in the loss.

    With "bce" every class is a question by itself, and the loss of an image is the sum over the classes.
    """

    def __init__(self, model: Model, loss: Loss = "ce", weights: Tensor | None = None, smoothing: float = 0.0):
        super().__init__()
        self.model = model
        self.loss = loss
        self.weights = weights
        self.smoothing = smoothing

    def forward(self, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        logits = self.model(images).float()
        return {"loss": self.compare(logits, targets), "top1": same_class(logits, targets)}

    def compare(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss of these logits."""
        if self.loss == "bce":
            weights = None if self.weights is None else targets @ self.weights[:, None]  # of every image: B 1
            return F.binary_cross_entropy_with_logits(logits, targets, weights, reduction="sum") / len(targets)
        if self.weights is not None:
            targets = weigh(targets, self.weights, self.smoothing)
        return F.cross_entropy(logits, targets)


def same_class(ours: Tensor, theirs: Tensor) -> Tensor:
    """The share of images in which the likeliest class is the same."""
    return (ours.detach().argmax(dim=1) == theirs.argmax(dim=1)).float().mean()


def weigh(targets: Tensor, weights: Tensor, smoothing: float) -> Tensor:
    """Targets, (B, K), multiplied by the weights of their classes as if before they were smoothed.

    To weigh smoothed targets would make every image pull towards the rare classes: of one that weighs 50, the little
    that smoothing gives it is half of what the image's own class has.
    """
    even = smoothing / targets.shape[1]
    sharp = (targets - even) * weights
    return sharp + sharp.sum(dim=1, keepdim=True) * even / (1 - smoothing)


class MultiLabel(nn.Module):
    """Binary cross-entropy: every label is there or not, whatever the others.

    With `weights`, (K,), the images that have a label count so many times.
    """

    def __init__(self, model: Model, weights: Tensor | None = None):
        super().__init__()
        self.model = model
        self.weights = weights

    def forward(self, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"loss": self.compare(self.model(images).float(), targets)}

    def compare(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss of these logits."""
        return F.binary_cross_entropy_with_logits(logits, targets, pos_weight=self.weights)


class Regression(nn.Module):
    """Squared error in standard deviations of the training set, so that numbers of any size are learnt alike."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: Model, mean: tuple[float, ...], std: tuple[float, ...]):
        super().__init__()
        self.model = model
        self.register_buffer("mean", torch.tensor(mean))
        self.register_buffer("std", torch.tensor(std))

    def forward(self, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"loss": self.compare(self.model(images).float(), targets)}

    def compare(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of these outputs."""
        return F.mse_loss(outputs, (targets - self.mean) / self.std)


AnyTask = MultiClass | MultiLabel | Regression


class Distilled(nn.Module):
    """The labels and a teacher, as in DeiT: https://arxiv.org/abs/2012.12877.

    The class token learns the labels and the distillation token the teacher, each through its own head; a student that
    has no such token learns both by its one head. The true labels alone are smoothed and weighted.
    """

    def __init__(
        self, task: AnyTask, distill: Distill = "hard", alpha: float = 0.5, tau: float = 1.0, compile: bool = False
    ):
        super().__init__()
        self.task = task
        model = task.model
        self.heads: Callable[[Tensor], tuple[Tensor, ...]] | None = None
        if len(model.classifiers()) == 2:
            self.heads = torch.compile(model.heads) if compile else model.heads
        self.distill = distill
        self.alpha = alpha
        self.tau = tau

    def forward(self, images: Tensor, targets: Tensor, taught: Tensor) -> dict[str, Tensor]:
        if self.heads is None:
            labelled = distilled = self.task.model(images).float()
        else:
            labelled, distilled = (logits.float() for logits in self.heads(images))
        lesson, agree = self._learn(distilled, taught)
        result = {"loss": (1 - self.alpha) * self.task.compare(labelled, targets) + self.alpha * lesson}
        if isinstance(self.task, MultiClass):
            result["top1"] = same_class(labelled + distilled, targets)
        return result if agree is None else result | {"agree": agree}

    def _learn(self, outputs: Tensor, taught: Tensor) -> tuple[Tensor, Tensor | None]:
        """The loss of these outputs beside the teacher's, and the share of answers that are the same."""
        if isinstance(self.task, Regression):
            return F.mse_loss(outputs, taught), None
        if isinstance(self.task, MultiLabel):
            chances = (taught / self.tau).sigmoid()
            loss = F.binary_cross_entropy_with_logits(outputs / self.tau, chances) * self.tau**2
            return loss, ((outputs > 0) == (taught > 0)).float().mean()
        if self.distill == "hard":
            loss = F.cross_entropy(outputs, taught.argmax(dim=1))
        else:
            ours, theirs = (F.log_softmax(logits / self.tau, dim=1) for logits in (outputs, taught))
            loss = F.kl_div(ours, theirs, reduction="batchmean", log_target=True) * self.tau**2
        return loss, same_class(outputs, taught)


def build_objective(model: Model, card: Card, config: TrainConfig, targets: Targets) -> nn.Module:
    """The objective of a run: that of its task, and what a teacher adds."""
    task, how = _of_task(model, card, config, targets), config.distillation
    if how.teacher is None:
        return task
    return Distilled(task, how.distill, how.distill_alpha, how.distill_tau, config.run.compile)


def _of_task(model: Model, card: Card, config: TrainConfig, targets: Targets) -> AnyTask:
    """The objective of the model's task, for training images with these targets."""
    weights = None
    if config.source.class_weights:
        weights = torch.from_numpy(class_weights(targets, len(card.classes))).to(config.run.device)
    if card.task == "multilabel":
        return MultiLabel(model, weights)
    if card.task == "regression":
        return Regression(model, card.target_mean, card.target_std).to(config.run.device)
    return MultiClass(model, config.optim.loss, weights, config.augment.smoothing)
