from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from PIL import Image

from vitrail.charts import figures
from vitrail.evaluate.metrics import Metrics, measure


def metrics_of(classes: list[str], images: int = 300) -> Metrics:
    random = np.random.default_rng(0)
    labels = random.integers(0, len(classes), images)
    logits = random.normal(size=(images, len(classes)))
    logits[np.arange(images), labels] += 3
    return measure(logits, labels, classes)


def history(epochs: int) -> list[dict[str, float]]:
    return [
        {
            "epoch": i,
            "step": 10 * i,
            "lr": 1e-3 / i,
            "train_loss": 2 / i,
            "train_top1": 1 - 0.5 / i,
            "val_loss": 2.5 / i,
            "val_top1": 0.9 - 0.1 * abs(i - 3),
            "val_top5": 0.99,
            "seconds": 1.0,
        }
        for i in range(1, epochs + 1)
    ]


def saved_size(figure: mpl.figure.Figure, path: Path) -> tuple[int, int]:
    figures.save(figure, path)
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert np.ptp(np.asarray(image.convert("L"))) > 200  # something is drawn, dark on white
        return image.size


def test_confusion_shows_every_count_that_is_not_zero_and_every_name():
    names = ["cat", "dog", "fox", "owl"]
    metrics = metrics_of(names)
    axes = figures.confusion(metrics).axes[0]
    counts = {
        (round(t.get_position()[1]), round(t.get_position()[0])): t.get_text()
        for t in axes.texts
        if t.get_text().isdigit()
    }
    expected = {(r, c): str(metrics.confusion[r, c]) for r, c in np.argwhere(metrics.confusion)}
    assert counts == expected
    assert [t.get_text() for t in axes.get_yticklabels()] == names
    assert [t.get_text() for t in axes.get_xticklabels()] == names
    assert f"{metrics.top1:.1%}" in axes.get_title(loc="left")


def test_confusion_colours_are_shares_of_the_row_even_of_a_row_without_images():
    logits = np.eye(3)[[0, 1, 1, 1]] * 9
    metrics = measure(logits, np.array([0, 0, 1, 1]), ["a", "b", "c"])
    shares = figures.confusion(metrics).axes[0].images[0].get_array()
    assert shares.tolist() == [[0.5, 0.5, 0], [0, 1, 0], [0, 0, 0]]


@pytest.mark.parametrize(("classes", "widest"), [(2, 800), (20, 2000), (100, 2300), (1000, 2300)])
def test_confusion_of_few_and_many_classes_fits_a_screen(classes: int, widest: int, tmp_path: Path):
    figure = figures.confusion(metrics_of([f"class {i}" for i in range(classes)]))
    axes = figure.axes[0]
    assert len(axes.get_yticklabels()) == min(classes, 100)
    assert bool([t for t in axes.texts if t.get_text().isdigit()]) == (classes <= 20)
    width, height = saved_size(figure, tmp_path / "figure.png")
    assert 400 < width < widest
    assert 400 < height < widest


def test_names_of_a_hundred_classes_do_not_overlap():
    figure = figures.confusion(metrics_of([f"class {i}" for i in range(100)]))
    figure.draw_without_rendering()
    boxes = [t.get_window_extent() for t in figure.axes[0].get_yticklabels()]
    assert all(upper.y0 >= lower.y1 for upper, lower in pairwise(boxes))


def test_long_names_keep_both_ends_and_odd_ones_are_taken_as_they_are(tmp_path: Path):
    names = ["a very long name indeed of a flower with red leaves", "$5 and $6", "100_%", "犬"]
    figure = figures.confusion(metrics_of(names))
    long, *odd = [t.get_text() for t in figure.axes[0].get_yticklabels()]
    assert len(long) <= 30
    assert long.startswith("a very")
    assert long.endswith("red leaves")
    assert odd == names[1:]
    saved_size(figure, tmp_path / "figure.png")


def test_reliability_has_a_bar_per_bin_as_high_as_its_accuracy(tmp_path: Path):
    metrics = metrics_of(list("abcde"))
    figure = figures.reliability(metrics)
    upper, lower = figure.axes
    assert [bar.get_height() for bar in upper.patches] == [b.accuracy for b in metrics.bins]
    assert [bar.get_x() for bar in upper.patches] == pytest.approx([i / 15 for i in range(15)])
    assert sum(bar.get_height() for bar in lower.patches) == pytest.approx(1)
    assert f"{metrics.ece:.1%}" in upper.get_title(loc="left")
    width, height = saved_size(figure, tmp_path / "figure.png")
    assert 500 < width < height < 1000


@pytest.mark.parametrize("epochs", [1, 5])
def test_curves_show_both_losses_both_accuracies_and_the_rate(epochs: int, tmp_path: Path):
    rows = history(epochs)
    figure = figures.curves(rows)
    loss, top1, lr = figure.axes
    assert [line.get_ydata().tolist() for line in loss.lines] == [
        [row["train_loss"] for row in rows],
        [row["val_loss"] for row in rows],
    ]
    assert top1.lines[1].get_ydata().tolist() == [row["val_top1"] for row in rows]
    assert lr.lines[0].get_ydata().tolist() == [row["lr"] for row in rows]
    assert [t.get_text() for t in loss.get_legend().get_texts()] == ["training", "validation"]
    width, height = saved_size(figure, tmp_path / "figure.png")
    assert 1000 < width < 2000
    assert height > 400


def test_curves_point_to_the_best_epoch_and_stand_gaps():
    rows = history(5)
    rows[0]["train_top1"] = rows[1]["val_top1"] = float("nan")
    top1 = figures.curves(rows).axes[1]
    assert top1.lines[-1].get_xdata() == [3]
    assert "epoch 3: 90.0%" in top1.texts[0].get_text()


def test_drawing_leaves_the_style_of_the_program_alone():
    before = dict(mpl.rcParams)
    figures.curves(history(3))
    assert dict(mpl.rcParams) == before
