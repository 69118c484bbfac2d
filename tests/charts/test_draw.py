from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from PIL import Image

from vitrail.charts import build
from vitrail.charts.draw import draw, save_charts
from vitrail.charts.kinds import Matrix
from vitrail.charts.measure import Measure
from vitrail.charts.style import save
from vitrail.studies.charts import series

TOP1 = Measure("top1", "top-1", percent=True, heading="Top-1 accuracy")
RNG = np.random.default_rng(0)


def confusion_of(names: list[str], images: int = 300) -> Matrix:
    random = np.random.default_rng(0)
    counts = np.zeros((len(names), len(names)), np.int64)
    np.add.at(counts, (random.integers(0, len(names), images), random.integers(0, len(names), images)), 1)
    return build.confusion(counts, names)


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
    save(figure, path)
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert np.ptp(np.asarray(image.convert("L"))) > 200  # something is drawn, dark on white
        return image.size


def test_confusion_shows_every_count_that_is_not_zero_and_every_name():
    names = ["cat", "dog", "fox", "owl"]
    chart = confusion_of(names)
    axes = draw(chart).axes[0]
    counts = {
        (round(t.get_position()[1]), round(t.get_position()[0])): t.get_text()
        for t in axes.texts
        if t.get_text().isdigit()
    }
    assert counts == {(r, c): str(chart.counts[r, c]) for r, c in np.argwhere(chart.counts)}
    assert [t.get_text() for t in axes.get_yticklabels()] == names
    assert [t.get_text() for t in axes.get_xticklabels()] == names
    assert axes.get_title(loc="left") == "Confusion matrix"
    assert chart.note in [t.get_text() for t in axes.texts]


def test_confusion_colours_are_shares_of_the_row_even_of_a_row_without_images():
    chart = build.confusion(np.array([[1, 1, 0], [0, 2, 0], [0, 0, 0]]), ["a", "b", "c"])
    shares = draw(chart).axes[0].images[0].get_array()
    assert shares.tolist() == [[0.5, 0.5, 0], [0, 1, 0], [0, 0, 0]]


@pytest.mark.parametrize(("classes", "widest"), [(2, 800), (20, 2000), (1000, 2300)])
def test_confusion_of_few_and_many_classes_fits_a_screen(classes: int, widest: int, tmp_path: Path):
    figure = draw(confusion_of([f"class {i}" for i in range(classes)]))
    axes = figure.axes[0]
    assert len(axes.get_yticklabels()) == min(classes, 100)
    assert bool([t for t in axes.texts if t.get_text().isdigit()]) == (classes <= 20)
    width, height = saved_size(figure, tmp_path / "figure.png")
    assert 400 < width < widest
    assert 400 < height < widest


def test_names_of_a_hundred_classes_do_not_overlap():
    figure = draw(confusion_of([f"class {i}" for i in range(100)]))
    figure.draw_without_rendering()
    boxes = [t.get_window_extent() for t in figure.axes[0].get_yticklabels()]
    assert all(upper.y0 >= lower.y1 for upper, lower in pairwise(boxes))


def test_long_names_keep_both_ends_and_odd_ones_are_taken_as_they_are(tmp_path: Path):
    names = ["a very long name indeed of a flower with red leaves", "$5 and $6", "100_%", "犬"]
    figure = draw(confusion_of(names))
    long, *odd = [t.get_text() for t in figure.axes[0].get_yticklabels()]
    assert len(long) <= 30
    assert long.startswith("a very")
    assert long.endswith("red leaves")
    assert odd == names[1:]
    saved_size(figure, tmp_path / "figure.png")


def test_reliability_has_a_bar_per_bin_as_high_as_its_accuracy(tmp_path: Path):
    bins = [((i + 0.5) / 15, float(RNG.random()), int(RNG.integers(0, 50))) for i in range(15)]
    chart = build.reliability(bins)
    figure = draw(chart)
    upper, lower = figure.axes
    assert [bar.get_height() for bar in upper.patches] == [accuracy for _, accuracy, _ in bins]
    assert [bar.get_x() for bar in upper.patches] == pytest.approx([i / 15 for i in range(15)])
    assert sum(bar.get_height() for bar in lower.patches) == pytest.approx(1)
    assert chart.note in [t.get_text() for t in upper.texts]
    width, height = saved_size(figure, tmp_path / "figure.png")
    assert 500 < width < height < 1000


@pytest.mark.parametrize("epochs", [1, 5])
def test_curves_show_both_losses_both_accuracies_and_the_rate(epochs: int, tmp_path: Path):
    rows = history(epochs)
    figure = draw(*build.curves(rows, TOP1))
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


def test_many_charts_are_drawn_in_two_rows_and_references_are_dashed(tmp_path: Path):
    watched = [build.watched(history(3), "val", TOP1, ("chance", 0.1)) for _ in range(5)]
    figure = draw(*watched)
    assert len(figure.axes) == 5
    value, level = figure.axes[0].lines
    assert (value.get_linestyle(), level.get_linestyle()) == ("-", "--")
    width, height = saved_size(figure, tmp_path / "figure.png")
    assert 1000 < width < 2000
    assert height > 800


def test_the_best_epoch_is_marked():
    top1 = draw(*build.curves(history(5), TOP1)).axes[1]
    assert top1.lines[-1].get_xdata() == [3]


def test_bars_are_the_average_precisions_best_first():
    chart = build.average_precision(list("abc"), [0.3, None, 0.6], [10, 0, 40], 100)
    axes = draw(chart).axes[0]
    assert [bar.get_width() for bar in axes.patches] == [0.6, 0.3]
    assert axes.lines[0].get_xdata().tolist() == [0.4, 0.1]
    assert [t.get_text() for t in axes.get_yticklabels()] == ["c", "a"]


def test_of_many_bars_the_lowest_are_drawn():
    chart = build.average_precision([f"{k}" for k in range(300)], np.linspace(0, 1, 300).tolist(), [1] * 300, 10)
    axes = draw(chart).axes[0]
    assert max(bar.get_width() for bar in axes.patches) == pytest.approx(99 / 299)
    assert "the 100 lowest" in axes.texts[0].get_text()


def test_lines_of_one_name_have_one_entry_in_the_legend():
    targets = (RNG.random((60, 5)) < 0.4).astype(np.float32)
    chart = build.precision_recall(targets, RNG.random((60, 5)), list("abcde"), [0.5] * 5)
    names = [t.get_text() for t in draw(chart).axes[0].get_legend().get_texts()]
    assert sorted(name.split(",")[-1].strip() for name in names) == ["each label", "micro-average", "the weakest"]


def test_every_value_is_drawn_against_the_truth():
    true = RNG.normal(size=(50, 2))
    said = true + RNG.normal(size=true.shape) * 0.2
    axes = draw(*build.predicted(["a", "b"], true, said, [0.9, 0.8], [1, 1], [2, 2])).axes
    assert len(axes) == 4
    assert [each.get_title(loc="left") for each in axes] == ["a", "", "b", ""]
    np.testing.assert_allclose(axes[2].collections[0].get_offsets(), np.stack([true, said], -1)[:, 1])
    np.testing.assert_allclose(axes[3].collections[0].get_offsets()[:, 1], (said - true)[:, 1])


def test_distances_are_the_dots():
    far = RNG.random((3, 4)) * 20
    far[2, 3] = np.nan  # a layer with fewer heads
    axes = draw(build.distance(far, np.full(3, 10.0), 28, 5)).axes[0]
    dots = np.array(axes.collections[0].get_offsets())
    np.testing.assert_allclose(sorted(dots[dots[:, 0] == 2, 1]), sorted(far[1]))
    assert len(dots) == 11


def test_draws_are_dots_around_their_means():
    axes = draw(build.shots([5, 1], [[0.5, 0.7], [0.2, 0.4]], [0.6, 0.3], [0.1, 0.1], 100)).axes[0]
    assert axes.collections[0].get_offsets().tolist() == [[1, 0.2], [1, 0.4], [5, 0.5], [5, 0.7]]
    assert [t.get_text() for t in axes.get_xticklabels()] == ["1", "5"]
    assert axes.lines[0].get_ydata().tolist() == [0.3, 0.6]


def test_the_range_test_marks_its_suggestion():
    lrs = np.geomspace(1e-6, 1, 50)
    axes = draw(build.lr_range(lrs, np.linspace(3, 2, 50), np.linspace(3, 1, 50), 1e-3)).axes[0]
    assert axes.get_xscale() == "log"
    assert axes.get_ylim() == pytest.approx((0.8, 3.2))
    assert any(list(line.get_xdata()) == [1e-3, 1e-3] for line in axes.lines)


def panels(**options):
    """Two charts of two series each, of 80 and 40 %."""
    table = {name: {"a": [level], "b": [level]} for name, level in (("one", 0.8), ("two", 0.8))}
    lower = {name: {"a": [0.4], "b": [0.4]} for name in table}
    options = {"name": "n", "title": "t", "note": "n", "x": "x", "names": ("a", "b")} | options
    return [series(each, **options) for each in (table, lower)]


def test_points_of_equal_value_are_beside_each_other_unless_lines_join_them():
    def places(**options):
        return [
            line.get_xdata().tolist() for line in draw(panels(**options)[0]).axes[0].lines if line.get_marker() == "o"
        ]

    first, second = places(joined=False)
    assert [b - a for a, b in zip(first, second, strict=True)] == pytest.approx([0.48, 0.48])
    assert places() == [[0, 1], [0, 1]]


def test_series_of_the_same_measure_have_one_range():
    upper, lower = draw(*panels()).axes
    assert upper.get_ylim() == lower.get_ylim()
    different = [panels()[0], panels(y="another measure")[1]]
    upper, lower = draw(*different).axes
    assert upper.get_ylim() != lower.get_ylim()


@pytest.mark.parametrize("count", [4, 20])
def test_logarithmic_axes_have_plain_numbers(count):
    points = {float(x): [0.5] for x in np.geomspace(1, 4, count)}
    figure = draw(series({"s": points}, name="n", title="t", note="n", x="x", log=True))
    figure.draw_without_rendering()
    names = [tick.get_text() for tick in figure.axes[0].get_xticklabels()]
    assert {"1", "4"} <= set(names)
    assert all(float(name) > 0 for name in names)


def test_charts_of_one_name_share_a_file(tmp_path: Path):
    save_charts([*build.curves(history(3), TOP1), confusion_of(["a", "b"])], tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["confusion.png", "curves.png"]


@pytest.mark.parametrize(("format", "begin"), [("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_figures_are_saved_as_vectors_too(format, begin, tmp_path: Path):
    save(draw(confusion_of(["a", "b"])), tmp_path / "figure", format)
    assert (tmp_path / "figure").read_bytes().startswith(begin)


def test_drawing_leaves_the_style_of_the_program_alone():
    before = dict(mpl.rcParams)
    draw(*build.curves(history(3), TOP1))
    assert dict(mpl.rcParams) == before
