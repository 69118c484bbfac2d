"""The learning-rate range test: a short run whose learning rate grows until the loss no longer comes down.

https://arxiv.org/abs/1506.01186. It is training like any other, with another schedule and without validation.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from vitrail.charts.build import lr_range
from vitrail.charts.draw import save_charts
from vitrail.errors import UserError
from vitrail.files import write_text
from vitrail.train.run import Progress
from vitrail.train.schedule import Schedule

LOWEST, HIGHEST, STEPS = 1e-6, 10.0, 175  # 25 steps for every factor of 10
_TRUSTED = 10  # steps before which a loss that rises is taken for chance
_WIDTH = 4.0  # steps, standard deviation of the smoothing


@dataclass(frozen=True)
class RangeTest(Schedule):
    """A schedule that writes down the loss of every step, and is over when training has diverged."""

    losses: list[float] = field(default_factory=list)

    @property
    def steps(self) -> int:
        return STEPS

    def lr(self, progress: Progress) -> float:
        return LOWEST * (HIGHEST / LOWEST) ** (progress.step / (STEPS - 1))

    def over(self, progress: Progress) -> bool:
        if progress.step > len(self.losses):
            self.losses.append(progress.sums["loss"] - sum(self.losses))
        if progress.step < _TRUSTED:
            return False
        recent = float(np.mean(self.losses[-5:]))
        begin, best = float(np.mean(self.losses[:_TRUSTED])), min(smooth(self.losses))
        return progress.step >= STEPS or recent > 1.5 * begin or recent > 4 * best

    def seconds_left(self, progress: Progress) -> float:
        return progress.elapsed / max(progress.step, 1) * (STEPS - progress.step)

    def rates(self) -> list[float]:
        return [LOWEST * (HIGHEST / LOWEST) ** (step / (STEPS - 1)) for step in range(len(self.losses))]

    def suggestion(self) -> float:
        """The learning rate at which the loss falls fastest, to two digits."""
        curve = smooth(self.losses)
        slopes = np.gradient(curve)
        steepest = int(slopes[: int(np.argmin(curve)) + 1].argmin())
        if slopes[steepest] >= 0:
            raise UserError(
                "The loss came down at no learning rate, so there is none to suggest. "
                "Look at the data with `vitrail check`, or take a larger --batch-size."
            )
        return float(f"{self.rates()[steepest]:.2g}")

    def fall(self) -> float:
        """By how much the loss came down at best, as a share of what it was."""
        curve = smooth(self.losses)
        return 1 - min(curve) / curve[0]

    def save(self, folder: Path) -> Path:
        """Makes a folder that holds the curve, lr.png, and its numbers, lr.json."""
        lr, rates, curve = self.suggestion(), self.rates(), smooth(self.losses)
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            raise UserError(f"The folder {folder} cannot be made: {error.strerror}. Choose another --out.") from error
        numbers = {"suggestion": lr, "lr": rates, "loss": self.losses, "smoothed": curve}
        write_text(folder / "lr.json", json.dumps(numbers, indent=2) + "\n")
        save_charts([lr_range(rates, self.losses, curve, lr)], folder)
        return folder


def smooth(losses: list[float]) -> list[float]:
    """Each loss averaged with those of the steps around it, which unlike a running mean is not late.

    One that explodes counts as twice what the loss was at first, or it would outweigh all around it.
    """
    limit = 2 * float(np.median(losses[:_TRUSTED]))
    places = np.arange(len(losses))
    weights = np.exp(-0.5 * ((places[:, None] - places) / _WIDTH) ** 2)
    averaged: list[float] = (weights @ np.minimum(losses, limit) / weights.sum(1)).tolist()
    return averaged
