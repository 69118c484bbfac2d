"""The charts of an evaluation, and the measures of all tasks."""

from __future__ import annotations

from collections.abc import Iterable

from vitrail.charts import build
from vitrail.charts.kinds import Chart
from vitrail.charts.measure import Measure
from vitrail.evaluate.metrics import AnyMetrics, Bin, LabelMetrics, Metrics, ValueMetrics, reliability_bins
from vitrail.evaluate.probes import FewShotMetrics, ProbeMetrics

# The main measure of each task, by which the best epoch is chosen, comes before its others.
MEASURES = {
    measure.name: measure
    for measure in (
        Measure("top1", "top-1", "images whose predicted class is right", percent=True, heading="Top-1 accuracy"),
        Measure("top5", "top-5", "images whose class is among the five most probable", percent=True),
        Measure(
            "ece", "calibration error", "mean gap between confidence and accuracy", percent=True, lower_is_better=True
        ),
        Measure("map", "mAP", "average precision, mean over labels", percent=True, heading="Mean average precision"),
        Measure("macro_f1", "macro F1", "F1 of each label at its threshold, mean over labels", percent=True),
        Measure("micro_f1", "micro F1", "F1 over all labels as one", percent=True),
        Measure("r2", "R²", "share of the variance that is explained"),
        Measure("mae", "MAE", "mean absolute error, in the units of the data", lower_is_better=True),
        Measure("rmse", "RMSE", "root mean squared error, in the units of the data", lower_is_better=True),
        Measure("loss", "loss", "the objective of the training", lower_is_better=True),
        Measure("precision", "precision", percent=True),
        Measure("recall", "recall", percent=True),
        Measure("f1", "F1", percent=True),
        Measure("ap", "average precision", percent=True),
    )
}


def main_measure(names: Iterable[str]) -> Measure:
    """The main measure among these: names of scores, or columns of metrics.csv."""
    there = {name.removeprefix("val_") for name in names}
    return next(measure for measure in MEASURES.values() if measure.name in there)


def charts_of(metrics: AnyMetrics | ProbeMetrics | FewShotMetrics) -> list[Chart]:
    """The charts of an evaluation; those that need every image by itself only where the metrics have them."""
    if isinstance(metrics, LabelMetrics):
        return _labels(metrics)
    if isinstance(metrics, ValueMetrics):
        return _values(metrics)
    if isinstance(metrics, FewShotMetrics):
        every = metrics.shots
        numbers, top1 = [shots.shots for shots in every], [shots.top1 for shots in every]
        means, stds = [shots.mean for shots in every], [shots.std for shots in every]
        return [build.shots(numbers, top1, means, stds, metrics.images)]
    charts: list[Chart] = [build.confusion(metrics.confusion, [score.name for score in metrics.per_class])]
    if isinstance(metrics, Metrics):
        charts.append(build.reliability(_plain(metrics.bins)))
    return charts


def _labels(metrics: LabelMetrics) -> list[Chart]:
    scores = metrics.per_label
    names = [score.name for score in scores]
    if len(metrics.unseen) == len(names):
        return []
    ap, support = [score.ap for score in scores], [score.support for score in scores]
    charts: list[Chart] = [build.average_precision(names, ap, support, metrics.images)]
    targets, chances = metrics.targets, metrics.probabilities
    if len(targets):
        bins = _plain(reliability_bins(chances.ravel(), targets.ravel() > 0.5))
        charts += [
            build.precision_recall(targets, chances, names, [score.threshold for score in scores]),
            build.reliability(bins, "probability of a label", "share that have it", "labels"),
        ]
    return charts


def _values(metrics: ValueMetrics) -> list[Chart]:
    if not len(metrics.targets):
        return []
    scores = metrics.per_value
    names, r2 = [score.name for score in scores], [score.r2 for score in scores]
    mae, rmse = [score.mae for score in scores], [score.rmse for score in scores]
    return [*build.predicted(names, metrics.targets, metrics.predicted, r2, mae, rmse)]


def _plain(bins: list[Bin]) -> list[tuple[float, float, int]]:
    return [(each.confidence, each.accuracy, each.count) for each in bins]
