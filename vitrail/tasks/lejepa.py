"""LeJEPA: joint-embedding prediction with a proven regulariser, https://arxiv.org/abs/2511.08544.

The projections of all views of an image approach their mean over the global views, while SIGReg keeps the distribution
of projections close to a standard normal one, so that they cannot collapse. There is no teacher, no stop-gradient and
one setting, the weight of SIGReg.

Legend: B batch, V global views, L local views, F features, D projection, M slices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vitrail.charts.measure import Measure
from vitrail.config import TrainConfig
from vitrail.models import Model, ModelConfig
from vitrail.models.projection import Projector
from vitrail.tasks import register
from vitrail.tasks.multicrop import MultiCrop, MultiCropObjective
from vitrail.tasks.objective import Batch, Objective
from vitrail.tasks.scores import Targets
from vitrail.world import world

SLICES = 256
NORMAL = 1.0525  # expectation of SIGReg for samples of a standard normal distribution
_KNOTS, _LAST = 17, 3.0


@register
@dataclass(frozen=True)
class LeJepa(MultiCrop):
    name: ClassVar[str] = "lejepa"
    title: ClassVar[str] = "LeJEPA"
    measures: ClassVar[tuple[Measure, ...]] = (
        replace(
            MultiCrop.measures[0],
            title="distance",
            meaning="distance between each validation image and its centre; in training, SIGReg is added",
        ),
        *MultiCrop.measures[1:],
    )
    logged: ClassVar[tuple[Measure, ...]] = (
        Measure(
            "distance", "distance", "how far the views of an image are from their mean", heading="Distance of views"
        ),
        Measure("sigreg", "SIGReg", "how far the projections are from a standard normal distribution"),
    )

    def levels(self, config: TrainConfig) -> dict[str, tuple[str, float]]:
        return super().levels(config) | {"sigreg": (f"standard normal: {NORMAL:.2f}", NORMAL)}

    @classmethod
    def small(cls, config: ModelConfig) -> dict[str, Any]:
        return super().small(config) | {"projection": 64, "sigreg": 0.05}

    def objective(self, model: Model, config: TrainConfig, targets: Targets) -> Objective:
        return LeJepaObjective(model, config)


class LeJepaObjective(MultiCropObjective):
    """The distance of views to their mean, and SIGReg."""

    def __init__(self, model: Model, config: TrainConfig):
        super().__init__(model, config, config.optim.model_ema)
        how = config.pretraining
        assert how.projection is not None
        assert how.sigreg is not None
        assert how.head_width is not None
        self.projector = Projector(model.config.features, how.projection, how.head_width)
        self.weight = how.sigreg

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        projected = self.project(self.features(batch))
        distance = (projected - projected[: self.views].mean(dim=0)).square().mean()
        directions = torch.randn(projected.shape[-1], SLICES).to(projected.device)  # new ones in every step
        normality = sigreg(projected, directions)
        loss = (1 - self.weight) * distance + self.weight * normality
        return {"loss": loss, "distance": distance, "sigreg": normality}

    def losses(self, features: Tensor) -> Tensor:
        """The distance alone: SIGReg is a property of a batch, not of an image."""
        self.projector.eval()
        projected = self.project(features)
        self.projector.train()
        return (projected - projected.mean(dim=0)).square().mean(dim=(0, 2))

    def project(self, features: Tensor) -> Tensor:
        """The projections of views, (V + L, B, D)."""
        projected: Tensor = self.projector(features.flatten(0, 1)).float()
        return projected.view(*features.shape[:2], -1)

    def added(self) -> dict[str, nn.Module]:
        return {"projector": self.projector}


def sigreg(projected: Tensor, directions: Tensor) -> Tensor:
    """Sketched isotropic Gaussian regularisation of projections, (…, B, D), along `directions`, (D, M).

    The Epps-Pulley statistic: how far the empirical characteristic function of each slice is from that of a standard
    normal distribution. Its expectation for such samples is `NORMAL`, whatever B and D.
    """
    slices = projected @ (directions / directions.norm(dim=0))  # … B M
    step = _LAST / (_KNOTS - 1)
    knots = torch.linspace(0, _LAST, _KNOTS, device=projected.device)
    window = torch.exp(-knots.square() / 2)
    weights = torch.full_like(knots, 2 * step)
    weights[0] = weights[-1] = step
    angles = slices.unsqueeze(-1) * knots  # … B M T
    real, imaginary = (world().average(part.mean(dim=-3)) for part in (angles.cos(), angles.sin()))
    distances = (real - window).square() + imaginary.square()
    return (distances @ (weights * window)).mean() * projected.shape[-2] * world().size
