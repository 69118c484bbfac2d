"""A task of one's own in one file: ordered levels, learnt by cumulative logits, measured by the mean absolute error.

For K levels a model has K - 1 outputs. Output k decides whether the level is above k; the differences of the
probabilities give the levels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.charts import build
from vitrail.charts.measure import Measure
from vitrail.tasks import Multiclass
from vitrail.tasks.bootstrap import Samples, collect, draws, sums
from vitrail.tasks.objective import Objective
from vitrail.tasks.scores import LOSS, Columnar, Scores, files_line, rounded


@dataclass(frozen=True)
class LevelScore:
    name: str
    mae: float
    support: int


@dataclass(frozen=True, eq=False, kw_only=True)
class OrdinalScores(Scores):
    mae: float  # in levels
    top1: float
    per_level: list[LevelScore]
    confusion: np.ndarray

    @property
    def main(self) -> float:
        return -self.mae

    @property
    def each(self) -> list[LevelScore]:
        return self.per_level

    def row(self) -> dict[str, float]:
        return {"loss": self.loss, "mae": self.mae, "top1": self.top1}

    def to_json(self) -> dict[str, Any]:
        levels = [rounded(asdict(score)) for score in self.per_level]
        return self.summary() | {"per_level": levels, "confusion": self.confusion.tolist()}

    def csv(self) -> dict[str, list[list[object]]]:
        return {"per_level": [["level", "mae", "support"], *([s.name, s.mae, s.support] for s in self.per_level)]}

    def table(self, most: int = 20) -> str:
        levels = [f"{s.name}  {s.mae:.3f}  {s.support}" for s in self.per_level[:most]]
        return "\n".join([f"MAE {self.mae:.3f} levels, top-1 {self.top1:.1%}", *levels, *files_line(self.folder)])


class CumulativeLoss(Objective):
    """Binary cross-entropy of every "above level k"."""

    def compare(self, outputs: Tensor, targets: Tensor) -> Tensor:
        above = targets.flip(1).cumsum(1).flip(1)[:, 1:]  # shares of levels as shares above each level
        return F.binary_cross_entropy_with_logits(cumulative(outputs), above)


def cumulative(outputs: Tensor) -> Tensor:
    """Outputs as logits that fall from one level to the next, (B, K - 1)."""
    return outputs[:, :1] - F.pad(F.softplus(outputs[:, 1:]), (1, 0)).cumsum(dim=1)


@dataclass(frozen=True)
class Ordinal(Multiclass):
    name: ClassVar[str] = "ordinal"
    title: ClassVar[str] = "ordinal"
    one: ClassVar[str] = "level"
    many: ClassVar[str] = "levels"
    measures: ClassVar[tuple[Measure, ...]] = (
        Measure("mae", "MAE", "mean distance from the true level", lower_is_better=True, heading="Level error"),
        Measure("top1", "top-1", "images whose likeliest level is the true one", percent=True),
        LOSS,
    )
    columns: ClassVar[tuple[Measure, ...]] = (Measure("mae", "MAE", lower_is_better=True),)
    ranked: ClassVar[str] = "mae"
    interchange: ClassVar[bool] = False

    @property
    def outputs(self) -> int:
        return len(self.classes) - 1

    @property
    def output_names(self) -> tuple[str, ...]:
        return tuple(f"above {name}" for name in self.classes[:-1])

    def objective(self, model, config, targets):
        return CumulativeLoss(model, config.optim.model_ema)

    def meaning(self, outputs: Tensor) -> Tensor:
        above = F.pad(cumulative(outputs).sigmoid(), (1, 0), value=1.0)
        return above - F.pad(above[:, 1:], (0, 1))

    def means(self, outputs: np.ndarray) -> np.ndarray:
        return self.meaning(torch.from_numpy(outputs.astype(np.float64))).numpy()

    def strength(self, outputs: Tensor) -> Tensor:
        return cumulative(outputs).sigmoid()

    def choice(self, outputs: np.ndarray) -> np.ndarray:
        return self.means(outputs).argmax(axis=1)

    def losses(self, outputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
        above = (targets[:, None] > np.arange(self.outputs)).astype(np.float64)
        logits = cumulative(torch.from_numpy(outputs.astype(np.float64))).numpy()
        return (np.logaddexp(0, logits) - above * logits).mean(axis=1)

    def meter(self) -> Columnar:
        def split(outputs, targets):
            return targets, self.choice(outputs), self.losses(outputs, targets)

        return Columnar(split, self._scores)

    def _scores(self, targets, said, losses) -> OrdinalScores:
        off, levels = np.abs(said - targets), range(len(self.classes))
        confusion = np.zeros((len(self.classes),) * 2, np.int64)
        np.add.at(confusion, (targets, said), 1)
        scores = [
            LevelScore(self.classes[k], float(off[targets == k].mean()) if (targets == k).any() else 0.0, int(n))
            for k, n in zip(levels, confusion.sum(axis=1), strict=True)
        ]
        return OrdinalScores(
            images=len(targets),
            loss=float(losses.mean()),
            mae=float(off.mean()),
            top1=float((off == 0).mean()),
            per_level=scores,
            confusion=confusion,
        )

    def restore(self, document: Mapping[str, Any]) -> OrdinalScores:
        return OrdinalScores(
            **{name: document[name] for name in ("images", "loss", "mae", "top1")},
            per_level=[LevelScore(**score) for score in document["per_level"]],
            confusion=np.array(document["confusion"]),
        )

    def differ(self, given, expected, tolerance):
        return (np.abs(self.means(given) - self.means(expected)) > tolerance).any(axis=1)

    def charts(self, scores: OrdinalScores):
        return [build.confusion(scores.confusion, self.classes)]

    def sample(self, scores, outputs, targets) -> Samples:
        if outputs is None:
            return Samples()
        off = np.abs(self.choice(outputs) - targets).astype(np.float64)
        parts = []
        for weights in draws(len(off)):
            whole = {"mae": weights @ off / len(off), "top1": weights @ (off == 0) / len(off)}
            there = np.maximum(sums(weights, targets, len(self.classes)), 1)
            parts.append((whole, {"mae": sums(weights, targets, len(self.classes), off) / there}))
        return collect(parts)

    def headline(self, data: str, score: str, images: str) -> tuple[str, str]:
        return f"grades {data} into {len(self.classes)} levels, off by ", f" levels on {images}."
