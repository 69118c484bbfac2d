from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vitrail.charts.style import save
from vitrail.data.dataset import ArraySplit, choose
from vitrail.explain.embedding_map import embedding_figure, embedding_map
from vitrail.tasks import Multiclass, Multilabel, Regression, Task, task_type


def heaps(count: int, classes: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Features in heaps, and the number of each one's heap."""
    random = np.random.default_rng(0)
    numbers = np.arange(count) % classes
    return 10 * np.eye(classes, 8)[numbers] + random.normal(size=(count, 8)), numbers


def split(targets: Any) -> ArraySplit:
    pixels = np.random.default_rng(0).integers(0, 256, (len(targets), 8, 8, 1), dtype=np.uint8)
    return ArraySplit(pixels, np.asarray(targets), "test")


def test_heaps_of_features_are_heaps_of_places():
    features, numbers = heaps(60)
    places = embedding_map(features)
    assert places.shape == (60, 2)
    assert places.dtype == np.float32
    apart = np.linalg.norm(places[:, None] - places, axis=2)
    np.fill_diagonal(apart, np.inf)
    assert (numbers[apart.argmin(axis=1)] == numbers).all()


def test_is_the_same_for_the_same_seed():
    features, _ = heaps(30)
    np.testing.assert_array_equal(embedding_map(features, seed=3), embedding_map(features, seed=3))


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8])
def test_a_few_images_have_places_too(count):
    features, _ = heaps(count)
    places = embedding_map(features)
    assert places.shape == (count, 2)
    assert np.isfinite(places).all()
    assert len(np.unique(places, axis=0)) == count


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_images_that_are_all_alike_have_places_too(value):
    assert np.isfinite(embedding_map(np.full((20, 5), value))).all()


def test_features_of_one_number_have_places_too():
    places = embedding_map(np.array([1.0, -2.0] * 10)[:, None])
    assert len(np.unique(places.round(3), axis=0)) == 2


def test_chooses_by_chance_no_more_than_a_map_can_show():
    assert choose(5, most=10).tolist() == [0, 1, 2, 3, 4]
    some = choose(100, most=10, seed=1)
    assert len(np.unique(some)) == 10
    assert (np.diff(some) > 0).all()
    assert choose(100, most=10, seed=1).tolist() == some.tolist() != choose(100, most=10, seed=2).tolist()


def drawn(tmp_path: Path, task: Task, targets: Any) -> Any:
    """The figure of random places, saved and checked for what is common to all."""
    places = np.random.default_rng(0).normal(size=(len(targets), 2)).astype(np.float32)
    figure = embedding_figure(places, split(targets), np.arange(len(targets)), task, "birds")
    save(figure, tmp_path / "map.png")
    with Image.open(tmp_path / "map.png") as image:
        assert image.width < 150 * 14.3
    assert f"{len(targets)} images of birds" in figure.texts[1].get_text()
    return figure


def test_every_class_is_named_at_its_middle_and_in_the_legend(tmp_path):
    names = ("cat", "$d_g$", "a very long name of a class that goes on " * 4, "猫")
    figure = drawn(tmp_path, Multiclass(names), np.arange(80) % 4)
    shown = [text.get_text() for text in figure.axes[0].texts]
    assert shown[:2] == ["cat", "$d_g$"]
    assert len(shown) == 4
    assert len(shown[2]) <= 18
    assert len(figure.legends[0].get_texts()) == 4
    assert "by class" in figure.texts[1].get_text()


def test_of_many_classes_the_largest_are_named_and_the_rest_is_grey(tmp_path):
    targets = np.concatenate([np.repeat(np.arange(5, 25), 4), np.arange(5), np.arange(25, 30)])
    figure = drawn(tmp_path, Multiclass(tuple(f"c{k}" for k in range(40))), targets)
    assert [text.get_text() for text in figure.axes[0].texts] == [f"c{k}" for k in range(5, 25)]
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words == [*(f"c{k}" for k in range(5, 25)), "10 other classes"]
    styles = {
        (tuple(points.get_facecolor()[0]), tuple(map(tuple, points.get_paths()[0].vertices)))
        for points in figure.axes[0].collections
    }
    assert len(styles) == 21  # every class can be told from every other


def test_names_do_not_cover_each_other(tmp_path):
    figure = drawn(tmp_path, Multiclass(tuple(f"name {k}" for k in range(12))), np.arange(240) % 12)
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    for i, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:i])


def test_labels_colour_by_the_first_and_numbers_by_value(tmp_path):
    targets = np.array([[0, 1, 1], [1, 0, 0], [0, 0, 0]] * 10, np.float32)
    figure = drawn(tmp_path, Multilabel(("a", "b", "c")), targets)
    assert [text.get_text() for text in figure.axes[0].texts] == ["a", "b", "(no label)"]
    assert "first of an image's labels" in figure.texts[1].get_text()
    figure = drawn(tmp_path, Regression(("age",)), np.linspace(0, 1, 30)[:, None])
    assert "by age" in figure.texts[1].get_text()
    assert not figure.legends


def test_images_without_labels_have_one_colour(tmp_path):
    figure = drawn(tmp_path, task_type("mae")(), np.zeros((30, 0), np.float32))
    assert "coloured" not in figure.texts[1].get_text()
    assert not figure.legends
    (points,) = figure.axes[0].collections
    assert len(points.get_offsets()) == 30
    assert len(points.get_facecolor()) == 1


def test_pictures_lie_in_cells_of_their_own_near_their_places():
    pixels = np.stack([np.full((8, 8, 1), value, np.uint8) for value in (10, 200)])
    places = np.array([[0, 0], [1, 1]], np.float32)
    figure = embedding_figure(
        places, ArraySplit(pixels, np.array([0, 1]), "test"), np.arange(2), Multiclass(("a", "b"))
    )
    canvas = np.asarray(figure.axes[1].images[0].get_array())
    side = len(canvas)
    lower_left, upper_right = canvas[side // 2 :, : side // 2], canvas[: side // 2, side // 2 :]
    assert np.isclose(lower_left, 10 / 255).all(axis=2).any()
    assert np.isclose(upper_right, 200 / 255).all(axis=2).any()
