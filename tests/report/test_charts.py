"""A page shows no more of a chart than it has room for, and says so."""

from __future__ import annotations

import numpy as np

from vitrail.charts import build
from vitrail.report.charts import fit


def test_of_many_classes_those_that_are_confused_most():
    counts = np.diag(np.full(60, 5))
    counts[3, 58] = counts[59, 3] = 7
    chart = build.confusion(counts, [f"class {i}" for i in range(60)])
    shown = fit(chart)
    assert len(shown.names) == 50
    assert {"class 3", "class 58", "class 59"} <= set(shown.names)
    assert shown.counts.shape == (50, 50)
    assert shown.totals[list(shown.names).index("class 3")] == 12
    assert shown.help.startswith("The 50 most confused of 60 classes.")
    assert shown.note == chart.note


def test_of_many_bars_the_lowest():
    shown = fit(build.average_precision([f"{k}" for k in range(80)], np.linspace(0, 1, 80).tolist(), [1] * 80, 9))
    assert len(shown.names) == len(shown.values) == len(shown.ticks) == 50
    assert shown.values.min() == 0
    assert shown.help.startswith("The 50 lowest of 80.")


def test_of_many_lines_those_that_stand_out_and_of_long_ones_some_points():
    rng = np.random.default_rng(0)
    targets = (rng.random((400, 20)) < 0.5).astype(np.float32)
    chart = build.precision_recall(targets, rng.random((400, 20)), [f"{k}" for k in range(20)], [0.5] * 20)
    shown = fit(chart)
    assert [line.tone for line in shown.lines] == ["warm", "cool"]
    assert all(len(line.x) == len(line.y) <= 150 for line in shown.lines)
    long = chart.lines[-1]
    assert (shown.lines[-1].x[0], shown.lines[-1].x[-1]) == (long.x[0], long.x[-1])


def test_of_many_points_some_each_with_its_own_prediction():
    true = np.arange(2000.0)[:, None]
    (chart,) = build.predicted(["x"], true, true + 1, [1], [1], [1])
    shown = fit(chart)
    assert len(shown.true) == 1500
    assert (shown.predicted - shown.true == 1).all()


def test_small_charts_are_whole():
    charts = [
        build.confusion(np.eye(3, dtype=np.int64), ["a", "b", "c"]),
        build.reliability([(0.5, 0.5, 1)]),
        *build.predicted(["x"], np.ones((5, 1)), np.ones((5, 1)), [1], [1], [1]),
    ]
    for chart in charts:
        assert fit(chart).to_json() == chart.to_json()
        assert fit(chart).help == chart.help
