"""Self-supervised pre-training: what its methods share. The data has no targets, and the saved model has no head.

A method is one file: a `Pretraining` task, registered by name, and its objective. Validation measures the method's
loss, and whether the features still differ between images: a collapsed encoder maps all images to one point.

Legend: N images, F features.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import numpy as np
from numpy.typing import NDArray

from vitrail.charts import build
from vitrail.charts.kinds import Chart
from vitrail.charts.measure import Measure, number
from vitrail.config import TrainConfig
from vitrail.errors import UserError
from vitrail.tasks.bootstrap import Samples
from vitrail.tasks.scores import Array, Floats, Meter, NotFinite, Numbers, Scores, Targets, files_line, rounded
from vitrail.tasks.task import Answer, Health, Line, Task

if TYPE_CHECKING:
    from torch import Tensor

    from vitrail.models import ModelConfig

_LEAST_RANK, _LEAST_SPREAD = 1.5, 0.003  # of features that have not collapsed; averages of tokens start at 0.03
_FEWEST = 10  # validation images that can tell
_ROUNDING = 1e-13  # variance of unit features in fp32 that differ by rounding only


@dataclass(frozen=True, eq=False, kw_only=True)
class FeatureScores(Scores):
    """The loss on validation images, and how much the features of these images differ."""

    rank: float  # neither is reported for few images
    spread: float
    features: int  # F
    knn: float | None = None  # accuracy on the data of --probe, if there is one

    @property
    def main(self) -> float:
        return -self.loss

    @property
    def standard_error(self) -> float:
        """Infinite, so that the last epoch is kept: no score without labels tells which epoch is the best."""
        return math.inf

    @property
    def each(self) -> Sequence[Any]:
        return ()

    def row(self) -> dict[str, float]:
        telling = self.images >= _FEWEST
        features = {"rank": self.rank, "spread": self.spread} if telling else {}
        probed = {} if self.knn is None else {"knn": self.knn}
        return {"loss": self.loss, **features, **probed}

    def to_json(self) -> dict[str, Any]:
        return rounded({"images": self.images, **self.row(), "features": self.features})

    def csv(self) -> dict[str, list[list[object]]]:
        return {}

    def table(self, most: int = 20) -> str:  # there are no classes to list
        features = [
            f"effective rank  {self.rank:.1f} of {self.features} features",
            f"spread          {self.spread:.3f} (1: features point in all directions, 0: collapsed)",
        ]
        lines = [
            f"{self.images:,} images without labels",
            "",
            f"loss            {self.loss:.4f}",
            *([] if self.images < _FEWEST else features),
            *([] if self.knn is None else [f"k-NN accuracy   {self.knn:.2%}"]),
        ]
        return "\n".join(lines + files_line(self.folder))


class FeatureMeter(Meter):
    """Accumulates losses, and first and second moments of features scaled to unit length.

    A row of outputs is an image's loss and its F features.
    """

    def __init__(self) -> None:
        self._images, self._loss = 0, 0.0
        self._sum: Floats | float = 0.0
        self._products: Floats | float = 0.0

    def add(self, outputs: NDArray[np.floating], targets: Targets) -> None:  # there are none
        if not np.isfinite(outputs).all():
            raise NotFinite("The model's features must be finite, but they are not: training diverged.")
        rows = outputs.astype(np.float64)
        units = rows[:, 1:] / np.maximum(np.linalg.norm(rows[:, 1:], axis=1, keepdims=True), 1e-12)
        self._images += len(rows)
        self._loss += float(rows[:, 0].sum())
        self._sum = self._sum + units.sum(axis=0)
        self._products = self._products + units.T @ units

    def merge(self, other: FeatureMeter) -> None:
        self._images += other._images
        self._loss += other._loss
        self._sum = self._sum + other._sum
        self._products = self._products + other._products

    def scores(self) -> FeatureScores:
        if not self._images:
            raise UserError("The split has no images to measure.")
        mean = np.asarray(self._sum) / self._images
        covariance = np.asarray(self._products) / self._images - np.outer(mean, mean)
        return FeatureScores(
            images=self._images,
            loss=self._loss / self._images,
            rank=effective_rank(covariance),
            spread=spread(covariance),
            features=len(mean),
        )


def effective_rank(covariance: Floats) -> float:
    """The effective rank of centred features: the exponential of the entropy of their singular values.

    As in RankMe (https://arxiv.org/abs/2210.02885): F if all directions are used equally, 1 if a single one is.
    """
    variances = np.linalg.eigvalsh(covariance)
    singular = np.sqrt(np.where(variances > _ROUNDING, variances, 0.0))
    if not singular.any():
        return 1.0
    shares = singular / singular.sum()
    shares = shares[shares > 0]
    return float(np.exp(-(shares * np.log(shares)).sum()))


def spread(covariance: Floats) -> float:
    """The mean standard deviation of unit features times √F: about 1 for random directions, 0 if they are all equal."""
    deviations = np.sqrt(np.diagonal(covariance).clip(min=0))
    return float(deviations.mean() * math.sqrt(len(deviations)))


@dataclass(frozen=True)
class Pretraining(Task):
    """Base class of self-supervised methods."""

    one: ClassVar[str] = "image"
    many: ClassVar[str] = "images"
    measures: ClassVar[tuple[Measure, ...]] = (
        Measure(
            "loss",
            "loss",
            "the training objective on validation images",
            lower_is_better=True,
            heading="Loss",
            comparable=False,
        ),
        Measure(
            "rank",
            "effective rank",
            "number of directions in which the features of images differ",
            heading="Effective rank",
            comparable=False,
        ),
        Measure(
            "spread",
            "spread",
            "how much the features of images differ: about 1 if they point in all directions, 0 if they are equal",
            heading="Spread",
            comparable=False,
        ),
        Measure(
            "knn",
            "k-NN accuracy",
            "share of the --probe images that nearest neighbours classify correctly",
            percent=True,
        ),
    )
    columns: ClassVar[tuple[Measure, ...]] = ()
    rescue: ClassVar[str] = "Lower --lr."  # what to do about collapsed features
    ranked: ClassVar[str] = ""
    counted: ClassVar[bool] = False
    labelled: ClassVar[bool] = False
    crops: ClassVar[bool] = False  # learns from several crops of each image

    @classmethod
    @abstractmethod
    def small(cls, config: ModelConfig) -> dict[str, Any]:
        """The method's options in `PretrainConfig`, for a small model and few images."""

    def __str__(self) -> str:
        return f"{self.title}, no labels"

    @property
    def outputs(self) -> int:
        return 0

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Task:  # there is nothing to read
        return cls()

    # Targets ----------------------------------------------------------------------------------------------

    def check(self, parts: Mapping[str, Targets], source: object) -> None:
        if len(parts["train"]) < 2:
            raise UserError(f"{source} has one image to learn from. Pre-training needs two or more.")

    def strata(self, targets: Targets, fraction: float) -> Numbers:
        return np.zeros(len(targets), np.int64)

    def settle(self, targets: Targets, keep: Numbers, held: Numbers) -> tuple[Numbers, Numbers]:
        """Keeps two images or more, as `check` demands."""
        back = max(2 - len(keep), 0)
        return np.sort(np.append(keep, held[:back])), held[back:]

    def reorder(self, targets: Targets, classes: Sequence[str]) -> Targets:
        return targets

    def describe(self, targets: Targets) -> Iterator[tuple[str, tuple[str, ...]]]:
        for _ in targets:
            yield "", ()

    # Validation -------------------------------------------------------------------------------------------

    def meter(self) -> Meter:
        return FeatureMeter()

    def restore(self, document: Mapping[str, Any]) -> Scores:
        known = {name: document[name] for name in ("images", "loss", "features")}
        known |= {name: document.get(name, math.nan) for name in ("rank", "spread")}  # missing for few images
        return FeatureScores(**known, knn=document.get("knn"))

    def charts(self, scores: Any) -> list[Chart]:
        return []

    def sample(
        self,
        scores: Any,
        outputs: NDArray[np.floating] | None,
        targets: Targets | None,
    ) -> Samples:
        return Samples()

    def goal(self, data: str) -> str:
        return f"read {data} without labels"

    def headline(self, data: str, score: str, images: str) -> tuple[str, str]:
        return f"was pre-trained by {self.title} on {data} without labels: ", "."

    def curves(self, rows: build.Rows, config: TrainConfig, kept: int | None) -> list[Chart]:
        levels = self.levels(config)
        wanted = [("val", measure) for measure in self.measures[1:]] + [("train", measure) for measure in self.logged]
        shown = [(part, measure) for part, measure in wanted if all(f"{part}_{measure.name}" in row for row in rows)]
        watched = [build.watched(rows, part, measure, levels.get(measure.name)) for part, measure in shown]
        return [build.losses(rows), *watched, build.rates(rows)]

    def levels(self, config: TrainConfig) -> dict[str, tuple[str, float]]:
        return {"rank": ("collapsed below", _LEAST_RANK), "spread": ("collapsed below", _LEAST_SPREAD)}

    def health(self, scores: FeatureScores, means: Mapping[str, float], config: TrainConfig) -> Health:
        """Whether the features of different images differ; the only definition of collapse."""
        if scores.images < _FEWEST:  # their rank is below their number
            sentence = (
                f"Effective rank and spread need {_FEWEST} validation images or more to show whether the features "
                f"collapse, not {scores.images}. Use more images or a larger --val-fraction."
            )
            return Health(None, sentence, "too few images")
        found = f"effective rank {scores.rank:.1f} of {scores.features}, spread {number(scores.spread)}"
        if scores.rank >= _LEAST_RANK and scores.spread >= _LEAST_SPREAD:
            least = f"collapsed is below {_LEAST_RANK} or {_LEAST_SPREAD}"
            return Health(True, f"The features look healthy: they differ between images ({found}; {least}).")
        where = "The features have collapsed: images are mapped to almost the same point"
        return Health(False, f"{where} ({found}). {self.rescue}", "features")

    # Answers: there is no head ----------------------------------------------------------------------------

    def meaning(self, outputs: Tensor) -> Tensor:
        return outputs

    def answers(self, meant: NDArray[np.floating], top: int | None = None) -> list[Answer]:
        self._no_head()

    def losses(self, outputs: NDArray[np.floating], targets: Targets) -> Floats:
        self._no_head()

    def right(self, outputs: NDArray[np.floating], targets: Targets) -> NDArray[np.bool_]:
        self._no_head()

    def margins(self, outputs: NDArray[np.floating]) -> Floats:
        self._no_head()

    def caption(self, meant: NDArray[np.floating], target: Any) -> list[Line]:
        self._no_head()

    def same(self, given: Array, expected: Array, tolerance: float) -> NDArray[np.bool_]:
        return np.asarray(np.isclose(given, expected, atol=tolerance).all(axis=1))

    def differ(self, given: Array, expected: Array, tolerance: float) -> NDArray[np.bool_]:
        return ~self.same(given, expected, tolerance)

    def _no_head(self) -> NoReturn:
        raise UserError(
            f"A model pre-trained by {self.title} has no head. Fine-tune it: vitrail train DATA --weights RUN"
        )
