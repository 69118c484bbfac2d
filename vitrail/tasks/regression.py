"""Regression: one or more numbers per image. Squared error of standardised values; MAE, RMSE, R²."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from vitrail.charts import build
from vitrail.charts.measure import Measure
from vitrail.config import AugmentConfig, TrainConfig
from vitrail.errors import UserError, shortlist
from vitrail.tasks.arrays import constant
from vitrail.tasks.bootstrap import Samples, collect, draws
from vitrail.tasks.columns import alike, column_names, float_columns, read_columns
from vitrail.tasks.distillation import soft_distillation
from vitrail.tasks.infer import number
from vitrail.tasks.scores import (
    LOSS,
    Array,
    Columnar,
    Floats,
    Meter,
    Numbers,
    Scores,
    Targets,
    files_line,
    mean_error,
)
from vitrail.tasks.task import Answer, Columns, Line, Task

if TYPE_CHECKING:
    from torch import Tensor

    from vitrail.charts.kinds import Chart
    from vitrail.models import Model
    from vitrail.tasks.objective import Objective

_BINS = 10  # of the value range, to stratify the hold-out


@dataclass(frozen=True)
class ValueScore:
    name: str
    mae: float
    rmse: float
    r2: float  # 0 where all true values are equal


@dataclass(frozen=True, eq=False, kw_only=True)
class RegressionScores(Scores):
    """Errors in the units of the data: means over the columns, and per column.

    The loss is the mean squared error in standard deviations of the training targets.
    """

    mae: float
    rmse: float
    r2: float
    per_value: list[ValueScore]
    predicted: Floats = field(repr=False)  # N K
    targets: Floats = field(repr=False)  # N K

    @property
    def main(self) -> float:
        return self.r2  # unitless, so it can be averaged over columns of different units

    @property
    def standard_error(self) -> float:
        """By the infinitesimal jackknife: from the derivative of R² by the weight of each image."""
        if not len(self.targets):  # restored from JSON
            return 0.0
        spread = self.targets.var(axis=0)
        varies = spread > 0
        squares = (self.targets - self.targets.mean(axis=0))[:, varies] ** 2 / spread[varies]
        errors = (self.predicted - self.targets)[:, varies] ** 2 / spread[varies]
        influence = (errors.mean(axis=0) * squares - errors).sum(axis=1) / len(self.targets) / len(spread)
        return float(np.sqrt((influence**2).sum()))

    @property
    def each(self) -> list[ValueScore]:
        return self.per_value

    def row(self) -> dict[str, float]:
        return {"loss": self.loss, "mae": self.mae, "rmse": self.rmse, "r2": self.r2}

    def summary(self) -> dict[str, float]:
        return {"images": self.images} | self.row()

    def to_json(self) -> dict[str, Any]:
        return self.summary() | {"per_value": [asdict(score) for score in self.per_value]}

    def csv(self) -> dict[str, list[list[object]]]:
        rows: list[list[object]] = [[s.name, f"{s.mae:.6g}", f"{s.rmse:.6g}", f"{s.r2:.6f}"] for s in self.per_value]
        return {"per_value": [["value", "mae", "rmse", "r2"], *rows]}

    def table(self, most: int = 20) -> str:  # values are few
        rows = [*self.per_value]
        if len(rows) > 1:
            rows.append(ValueScore("mean", self.mae, self.rmse, self.r2))
        width = max(len("value"), *(len(score.name) for score in rows))
        lines = [
            f"images  {self.images:,}",
            f"loss    {self.loss:.4f}",
            "",
            f"{'value':<{width}}  {'MAE':>10}  {'RMSE':>10}  {'R²':>7}",
            *(f"{s.name:<{width}}  {s.mae:>10.4g}  {s.rmse:>10.4g}  {s.r2:>7.4f}" for s in rows),
        ]
        return "\n".join(lines + files_line(self.folder))


class ValuesAnswer(Answer):
    """The predicted values of an image, in the units of the data."""

    form: ClassVar[str] = "values"

    def text(self, digits: int = 1, width: int = 0) -> str:  # values are not percentages
        form = ".6g" if width else ".3g"
        pairs = zip(self.labels, self.values, strict=True)
        return ("  " if width else ", ").join(f"{name} {value:{form}}" for name, value in pairs)

    def columns(self) -> list[str]:
        return list(self.labels)

    def cells(self) -> list[str]:
        return [f"{value:.8g}" for value in self.values]

    def to_json(self) -> dict[str, Any]:
        return {"values": dict(zip(self.labels, self.values, strict=True))}


@dataclass(frozen=True)
class Regression(Task):
    """One or more numbers per image. Outputs are standardised by mean and std of the training targets."""

    target_mean: tuple[float, ...] = ()
    target_std: tuple[float, ...] = ()

    name: ClassVar[str] = "regression"
    title: ClassVar[str] = "regression"
    one: ClassVar[str] = "value"
    many: ClassVar[str] = "values"
    measures: ClassVar[tuple[Measure, ...]] = (
        Measure("r2", "R²", "share of the variance that is explained"),
        Measure("mae", "MAE", "mean absolute error, in the units of the data", lower_is_better=True),
        Measure("rmse", "RMSE", "root mean squared error", lower_is_better=True),
        LOSS,
    )
    columns: ClassVar[tuple[Measure, ...]] = (
        Measure("r2", "R²", at_most_one=True),
        Measure("mae", "MAE", lower_is_better=True),
        Measure("rmse", "RMSE", lower_is_better=True),
    )
    choices: ClassVar[Mapping[str, str]] = {"r2": "r2", "loss": "loss"}
    ranked: ClassVar[str] = "r2"
    counted: ClassVar[bool] = False
    meant: ClassVar[str] = "values"
    answer: ClassVar[type[Answer]] = ValuesAnswer
    worst_title: ClassVar[str] = "Predictions with the largest error."
    best_title: ClassVar[str] = "Predictions with the smallest error."

    # Targets ----------------------------------------------------------------------------------------------

    @classmethod
    def from_text(
        cls,
        columns: Columns,
        rows: Sequence[int],
        where: str,
        known: Sequence[str] | None = None,
    ) -> tuple[Task, Targets]:
        return cls(tuple(columns)), read_columns(columns, rows, where, number, "a number")

    @classmethod
    def from_array(cls, labels: Sequence[Array], names: Sequence[str] | None, where: str) -> tuple[Task, list[Targets]]:
        targets = float_columns(labels, where, "K finite numbers", np.isfinite)
        if names is None and targets[0].shape[1] == 1:
            names = ("value",)
        return cls(column_names(targets, names, where, cls)), targets

    def check(self, parts: Mapping[str, Targets], source: object) -> None:
        same = np.ptp(parts["train"], axis=0) == 0
        if same.any():
            raise alike(self.classes[int(same.argmax())], source)

    def strata(self, targets: Targets, fraction: float) -> Numbers:
        """The tenth of the range that the image's first value falls in, by rank."""
        bins = min(max(int(len(targets) * fraction), 1), _BINS)  # few images: hold out at most one per bin
        ranks = np.argsort(np.argsort(targets[:, 0], kind="stable"), kind="stable")
        return ranks * bins // len(targets)

    def adopt(self, model: Task, parts: Mapping[str, Targets], source: object) -> dict[str, Targets]:
        if missing := sorted(set(model.classes) - set(self.classes)):
            raise UserError(f"The model predicts {shortlist(missing, 5)}, which {source} does not have.")
        return super().adopt(model, parts, source)

    def reorder(self, targets: Targets, classes: Sequence[str]) -> Targets:
        moved = np.zeros((len(targets), len(classes)), dtype=np.float32)
        moved[:, [classes.index(name) for name in self.classes]] = targets
        return moved

    def describe(self, targets: Targets) -> Iterator[tuple[str, tuple[str, ...]]]:
        for target in targets:
            yield ", ".join(f"{value:g}" for value in target), self.classes

    def statistics(self, targets: Targets) -> dict[str, Floats]:
        values = targets.astype(np.float64)
        return {
            "minimum": values.min(axis=0),
            "mean": values.mean(axis=0),
            "maximum": values.max(axis=0),
            "std": values.std(axis=0),
        }

    def examples(self, targets: Targets, count: int, rng: np.random.Generator) -> dict[int, Numbers]:
        """Images from the lowest to the highest first value."""
        order = np.argsort(targets[:, 0], kind="stable")
        return {0: order[np.linspace(0, len(order) - 1, min(count, len(order))).astype(int)]}

    def plain(self) -> Task:
        return replace(self, target_mean=(0.0,) * len(self.classes), target_std=(1.0,) * len(self.classes))

    def fitted(self, targets: Targets) -> Task:
        """With the mean and the standard deviation of the training targets."""
        values = targets.astype(np.float64)
        mean, std = values.mean(axis=0).tolist(), values.std(axis=0).tolist()
        return replace(self, target_mean=tuple(mean), target_std=tuple(std))

    # Training ---------------------------------------------------------------------------------------------

    def adapt(self, config: TrainConfig) -> TrainConfig:
        """Without augmentation, which may change the values."""
        return replace(config, augment=AugmentConfig())

    def check_settings(self, config: TrainConfig, given: Mapping[str, Any], source: str) -> TrainConfig:
        config = super().check_settings(config, given, source)
        if config.distillation.teacher and "distill_tau" in given:
            raise UserError(f"--distill-tau needs probabilities, but {source} is a regression. Leave it out.")
        return soft_distillation(config, given)

    def objective(self, model: Model, config: TrainConfig, targets: Targets) -> Objective:
        from vitrail.tasks.objective import SquaredError

        return SquaredError(model, self.target_mean, self.target_std, config.optim.model_ema).to(config.run.device)

    def translate(self, outputs: Tensor, teacher: Task) -> Tensor:
        assert isinstance(teacher, Regression)
        values = teacher.meaning(outputs)
        named = set(teacher.classes) == set(self.classes)
        order = [self.classes.index(name) for name in teacher.classes] if named else range(len(self.classes))
        mean, std = ([numbers[k] for k in order] for numbers in (self.target_mean, self.target_std))
        return (values - constant(mean, values)) / constant(std, values)

    # Answers ----------------------------------------------------------------------------------------------

    def meaning(self, outputs: Tensor) -> Tensor:
        return outputs * constant(self.target_std, outputs) + constant(self.target_mean, outputs)

    def strength(self, outputs: Tensor) -> Tensor:
        """In standard deviations, to compare values of different units."""
        return outputs

    def answers(self, meant: NDArray[np.floating], top: int | None = None) -> list[Answer]:
        return [ValuesAnswer(self.classes, values=tuple(row)) for row in meant.tolist()]

    def meter(self) -> Meter:
        return Columnar(lambda outputs, targets: (self.means(outputs), targets.astype(np.float64)), self._scores)

    def _scores(self, predicted: Floats, true: Floats) -> RegressionScores:
        errors = predicted - true
        mae, mse = np.abs(errors).mean(axis=0), (errors**2).mean(axis=0)
        spread = true.var(axis=0)
        r2 = np.where(spread > 0, 1 - mse / np.where(spread > 0, spread, 1), 0.0)
        return RegressionScores(
            images=len(true),
            mae=float(mae.mean()),
            rmse=float(np.sqrt(mse).mean()),
            r2=float(r2.mean()),
            loss=float((mse / np.asarray(self.target_std) ** 2).mean()),
            loss_error=mean_error(((errors / np.asarray(self.target_std)) ** 2).mean(axis=1)),
            per_value=[
                ValueScore(name, float(mae[k]), float(np.sqrt(mse[k])), float(r2[k]))
                for k, name in enumerate(self.classes)
            ],
            predicted=predicted,
            targets=true,
        )

    def restore(self, document: Mapping[str, Any]) -> RegressionScores:
        none = np.zeros((0, len(self.classes)))
        return RegressionScores(
            **{name: document[name] for name in ("images", "mae", "rmse", "r2", "loss")},
            per_value=[ValueScore(**score) for score in document["per_value"]],
            predicted=none,
            targets=none,
        )

    # Single predictions -----------------------------------------------------------------------------------

    def losses(self, outputs: NDArray[np.floating], targets: Targets) -> Floats:
        """Squared error in standard deviations of the training targets, mean over the values."""
        errors = (self.means(outputs) - targets) / np.asarray(self.target_std)
        return (errors**2).mean(axis=1)

    def right(self, outputs: NDArray[np.floating], targets: Targets) -> NDArray[np.bool_]:
        """Within half a standard deviation."""
        return np.asarray(np.sqrt(self.losses(outputs, targets)) < 0.5)

    def worst(self, outputs: NDArray[np.floating], targets: Targets, count: int) -> Numbers:
        """Largest error first, whether right or wrong."""
        return np.argsort(-self.losses(outputs, targets), kind="stable")[:count]

    def best(self, outputs: NDArray[np.floating], targets: Targets, count: int) -> Numbers:
        return np.argsort(self.losses(outputs, targets), kind="stable")[:count]

    def margins(self, outputs: NDArray[np.floating]) -> Floats:
        raise UserError("A regression model has no confidence, so its predictions cannot be ranked by it.")

    def caption(self, meant: NDArray[np.floating], target: Any) -> list[Line]:
        """The value with the largest error, in its unit."""
        worst = int(np.argmax(np.abs(meant - target) / np.asarray(self.target_std)))
        name = f"{self.classes[worst]} " if len(self.classes) > 1 else ""
        return [(f"true: {name}{target[worst]:.4g}", "plain", 2), (f"predicted: {name}{meant[worst]:.4g}", "wrong", 2)]

    def said(self, meant: NDArray[np.floating], target: Any) -> tuple[str, str]:
        said, truth = (
            ", ".join(f"{name}\u00a0{value:.3g}" for name, value in zip(self.classes[:4], row, strict=False))
            for row in (meant, target)
        )
        return said, truth

    def ranking(self, outputs: NDArray[np.floating]) -> Numbers:
        """The order of the columns: values have no ranking."""
        return np.tile(np.arange(outputs.shape[1]), (len(outputs), 1))

    def same(self, given: Array, expected: Array, tolerance: float) -> NDArray[np.bool_]:
        return np.asarray((np.abs(given - expected) <= tolerance).all(axis=1))

    def differ(self, given: Array, expected: Array, tolerance: float) -> NDArray[np.bool_]:
        return ~self.same(given, expected, tolerance)

    # Reports ----------------------------------------------------------------------------------------------

    def charts(self, scores: RegressionScores) -> list[Chart]:
        if not len(scores.targets):  # restored from JSON
            return []
        each = scores.per_value
        r2, mae, rmse = ([getattr(score, name) for score in each] for name in ("r2", "mae", "rmse"))
        return [*build.predicted([score.name for score in each], scores.targets, scores.predicted, r2, mae, rmse)]

    def sample(
        self, scores: RegressionScores, outputs: NDArray[np.floating] | None, targets: Targets | None
    ) -> Samples:
        if outputs is None or targets is None:
            return Samples()
        true, errors = scores.targets, scores.predicted - scores.targets
        middle = true - true.mean(axis=0)  # centred for numerical precision
        parts = []
        for weights in draws(len(true)):
            mae, mse = weights @ np.abs(errors) / len(true), weights @ errors**2 / len(true)
            spread = weights @ middle**2 / len(true) - (weights @ middle / len(true)) ** 2
            r2 = np.where(spread > 0, 1 - mse / np.where(spread > 0, spread, 1), 0.0)
            each = {"mae": mae, "rmse": np.sqrt(mse), "r2": r2}
            parts.append(({name: values.mean(axis=1) for name, values in each.items()}, each))
        return collect(parts)

    def goal(self, data: str) -> str:
        return f"predict {shortlist(self.classes, 3)} from {data}"

    def headline(self, data: str, score: str, images: str) -> tuple[str, str]:
        return f"predicts {shortlist(self.classes, 3)} from {data}: an R² of ", f" on {images}."

    @property
    def output_names(self) -> tuple[str, ...]:
        return tuple(f"higher {name}" for name in self.classes)
