"""Charts say what was measured, in numbers and in words."""

from __future__ import annotations

import json

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, f1_score

from vitrail.charts import build
from vitrail.charts.measure import Measure, number, percent

TOP1 = Measure("top1", "top-1", percent=True, heading="Top-1 accuracy")
ERROR = Measure("mae", "MAE", lower_is_better=True)


def rows(**columns: list[float]) -> list[dict[str, float]]:
    epochs = len(next(iter(columns.values())))
    base = {"lr": 0.1, "train_loss": 2.0, "val_loss": 1.5, "seconds": 60.0}
    return [base | {"epoch": i + 1} | {name: values[i] for name, values in columns.items()} for i in range(epochs)]


def test_curves_point_to_the_best_epoch_and_stand_gaps():
    chart = build.curves(rows(train_top1=[float("nan"), 1, 1], val_top1=[0.5, float("nan"), 0.9]), TOP1)[1]
    assert (chart.title, chart.note) == ("Top-1 accuracy", "best validation score 90.0% in epoch 3")
    assert [line.dot for line in chart.lines] == [None, (3, 0.9)]
    assert chart.to_json()["lines"][1]["y"] == [0.5, None, 0.9]


def test_curves_point_to_the_epoch_that_was_kept():
    chart = build.curves(rows(val_top1=[0.5, 0.9, 0.88]), TOP1, kept=3)[1]
    assert chart.note == "kept epoch 3: 88.0%; best 90.0%"
    assert "within one standard error" in chart.help
    assert [line.dot for line in chart.lines] == [(3, 0.88)]
    assert build.curves(rows(val_top1=[0.5, 0.9, 0.9]), TOP1, kept=3)[1].lines[0].dot == (3, 0.9)


def test_the_best_epoch_may_be_the_lowest():
    chart = build.curves(rows(val_mae=[3.0, 1.0, 2.0]), ERROR)[1]
    assert (chart.title, chart.note) == ("MAE", "best validation score 1 in epoch 2")
    assert not chart.percent
    assert len(chart.lines) == 1


def test_the_loss_is_drawn_where_it_is_measured():
    both = build.losses(rows(val_top1=[0.5]))
    assert (both.title, both.note, len(both.lines)) == ("Loss", "final validation loss 1.500", 2)
    alone = build.losses([{name: v for name, v in row.items() if name != "val_loss"} for row in rows(val_ap50=[0.5])])
    assert (alone.title, alone.note, len(alone.lines)) == ("Training loss", "final training loss 2.000", 1)


def test_runs_are_put_together_by_epoch_and_by_time():
    by_epoch, by_time, loss = build.together({"a": rows(val_top1=[0.1, 0.2]), "b": [], "c": rows(val_top1=[0.3])}, TOP1)
    assert [(line.name, line.tone) for line in by_epoch.lines] == [("a", 0), ("c", 2)]
    assert by_time.lines[0].x.tolist() == [1, 1]  # minutes
    assert [line.y.tolist() for line in loss.lines] == [[1.5, 1.5], [1.5]]
    assert build.together({"a": []}, TOP1) == []


def test_a_watched_value_is_compared_with_its_level():
    chart = build.watched(rows(val_mae=[3.0, 1.0]), "val", ERROR, ("chance", 2.5))
    assert (chart.title, chart.note) == ("MAE", "1 in the last epoch")
    value, level = chart.lines
    assert (value.name, value.tone, value.dashed) == ("validation", "cool", False)
    assert (level.name, level.y.tolist(), level.dashed) == ("chance", [2.5, 2.5], True)
    assert len(build.watched(rows(train_mae=[3.0]), "train", ERROR, None).lines) == 1


def test_a_measure_that_no_run_has_is_not_drawn():
    runs = {"a": rows(val_mae=[1.0]), "b": rows(val_top1=[0.5]), "c": []}
    chart = build.overlaid(runs, TOP1)
    assert [line.name for line in chart.lines] == ["b"]
    assert build.overlaid({"a": runs["a"]}, TOP1) is None


def test_confusion_says_how_many_are_right():
    chart = build.confusion(np.array([[3, 1], [0, 4]]), ["a", "b"])
    assert chart.note == "top-1 accuracy 87.5%, 8 images"
    assert chart.label == "Confusion matrix: top-1 accuracy 87.5%, 8 images."
    assert chart.totals.tolist() == [4, 4]


def test_reliability_says_how_far_off_confidence_is():
    chart = build.reliability([(0.2, 0.5, 10), (0.9, 0.6, 30)])
    assert chart.note == "calibration error 30.0%, overconfident by 15.0 points"
    assert "underconfident by 30.0 points" in build.reliability([(0.2, 0.5, 10)]).note


def test_precision_and_recall_are_those_of_scikit_learn():
    rng = np.random.default_rng(0)
    targets = (rng.random((80, 4)) < 0.4).astype(np.float32)
    targets[:, 3] = 0
    chances, thresholds = rng.random((80, 4)), [0.3, 0.5, 0.7, 0.5]
    chart = build.precision_recall(targets, chances, list("abcd"), thresholds)
    given = chances >= thresholds
    f1 = f1_score(targets[:, :3], given[:, :3], average="macro")
    assert percent(f1) in chart.note
    ap = {name: average_precision_score(targets[:, k], chances[:, k]) for k, name in enumerate("abc")}
    assert [line.name for line in chart.lines if line.tone == "warm"] == [f"{min(ap, key=ap.get)}, the weakest"]
    assert len(chart.lines) == 4  # the labels that some image has, and all as one
    hits = (given[:, 0] & (targets[:, 0] > 0.5)).sum()
    assert chart.lines[0].dot == pytest.approx((hits / targets[:, 0].sum(), hits / given[:, 0].sum()))


def test_labels_that_no_image_has_leave_nothing_to_draw():
    nothing = np.zeros((5, 2), np.float32)
    assert build.precision_recall(nothing, nothing + 0.5, ["a", "b"], [0.5, 0.5]).lines == ()
    assert build.average_precision(["a", "b"], [None, None], [0, 0], 5).names == ()


def test_of_many_numbers_the_worst_are_shown_in_their_order():
    values = np.random.default_rng(0).normal(size=(20, 8))
    r2 = [0.9, 0.1, 0.8, 0.3, 0.2, 0.4, 0.95, 0.5]
    charts = build.predicted(list("abcdefgh"), values, values + 1, r2, [1] * 8, [2.5] * 8)
    assert [chart.title for chart in charts] == list("bcdefh")
    assert charts[0].note == "R² 0.1, MAE 1, RMSE 2.5"


def test_the_range_test_says_where_loss_falls_fastest_and_is_lowest():
    chart = build.lr_range([0.001, 0.01, 0.1], [3, 2, 1], [3, 1, 2], 0.003)
    assert chart.note == "loss falls fastest at 0.003, lowest at 0.01; 3 steps"


def test_a_single_image_is_not_plural():
    assert "mean over 1 image" in build.distance(np.ones((2, 2)), [1, 1], 8, 1).note
    assert build.shots([1], [[0.5]], [0.5], [0.0], 1).note == "one draw, 1 image"


def test_charts_are_plain_json_with_short_numbers():
    charts = [
        *build.curves(rows(val_top1=[1 / 3, float("nan")]), TOP1),
        build.confusion(np.eye(2, dtype=np.int64), ["a", "b"]),
        build.reliability([(0.123456789, 0.5, 3)]),
        build.average_precision(["a"], [1 / 3], [1], 3),
        *build.predicted(["x"], np.ones((2, 1)), np.zeros((2, 1)), [0.5], [1], [1]),
        build.distance(np.ones((2, 2)), [1, 1], 8, 3),
        build.shots([1], [[0.5]], [0.5], [0.0], 10),
    ]
    specs = [json.loads(json.dumps(chart.to_json(), allow_nan=False)) for chart in charts]
    assert {spec["kind"] for spec in specs} == {
        "lines", "matrix", "reliability", "bars", "scatter", "heads", "error_bars"
    }  # fmt: skip
    assert specs[1]["lines"][0]["y"] == [0.33333, None]
    assert specs[4]["bins"] == [[0.12346, 0.5, 3]]
    assert not any("note" in spec or "help" in spec for spec in specs)


def test_numbers_are_rounded_by_one_rule():
    assert (TOP1.text(0.91234), TOP1.text(0.91234, 2)) == ("91.2%", "91.23%")
    assert (ERROR.text(12.3456), ERROR.text(12.3456, 2)) == ("12.3", "12.35")
    assert (percent(0.5, 0), number(1234.5, 6)) == ("50%", "1234.5")
    assert (TOP1.best([1, 2]), ERROR.best([1, 2])) == (2, 1)
