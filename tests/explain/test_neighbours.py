from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest
from PIL import Image
from sklearn.metrics.pairwise import cosine_similarity

from vitrail.charts.style import INK, ORANGE
from vitrail.charts.tiles import Caption, Tile
from vitrail.data.dataset import ArraySplit
from vitrail.errors import UserError
from vitrail.explain.neighbours import neighbours, neighbours_figure, unit
from vitrail.tasks import Multiclass, Multilabel, Regression

module = import_module("vitrail.explain.neighbours")  # the package has the function under this name


def vectors(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, 6)).astype(np.float32)


def test_are_the_nearest_by_cosine(monkeypatch):
    monkeypatch.setattr(module, "_ROWS", 4)  # several blocks
    queries, features = vectors(10), vectors(50, seed=1) * np.linspace(0.01, 100, 50)[:, None]
    found, cosines = neighbours(queries, features, k=5)
    expected = cosine_similarity(queries, features)
    np.testing.assert_array_equal(found, np.argsort(-expected, axis=1)[:, :5])
    np.testing.assert_allclose(cosines, np.sort(expected, axis=1)[:, :-6:-1], rtol=1e-4, atol=1e-6)
    assert cosines.dtype == np.float32


def test_an_image_is_no_neighbour_of_its_own(monkeypatch):
    monkeypatch.setattr(module, "_ROWS", 2)
    features = vectors(8)
    own = np.array([5, 0, 3])
    found, cosines = neighbours(features[own], features, k=7, own=own)
    for row, number in zip(found, own, strict=True):
        assert sorted([*row, number]) == list(range(8))
    assert np.isfinite(cosines).all()


def test_equals_come_in_their_order_and_nothing_is_divided_by_zero():
    features = np.array([[0, 0], [2, 0], [1, 0], [0, 1]], np.float32)
    found, cosines = neighbours(np.array([[3, 0], [0, 0]]), features, k=4)
    assert found.tolist() == [[1, 2, 0, 3], [0, 1, 2, 3]]
    assert cosines.tolist() == [[1, 1, 0, 0], [0, 0, 0, 0]]
    assert unit(features)[1].tolist() == [1, 0]


@pytest.mark.parametrize(("k", "own"), [(0, None), (9, None), (8, [0, 1])])
def test_refuses_more_than_there_are(k, own):
    with pytest.raises(UserError, match="'k' must be"):
        neighbours(vectors(2), vectors(8), k, own)


def test_marks_neighbours_of_other_classes():
    split = ArraySplit(np.zeros((4, 8, 8, 1), np.uint8), np.array([0, 1, 0, 1]), "test")
    query = Tile(Image.new("L", (8, 8)), [Caption("mine")])
    found, cosines = np.array([[0, 1, 2]]), np.array([[0.9, 0.5, -0.25]], np.float32)
    figure = neighbours_figure([query], split, found, cosines, Multiclass(("cat", "$dog$")), [frozenset({"cat"})])
    words = [(text.get_text(), text.get_color()) for text in figure.texts[2:]]
    assert words == [
        ("mine", INK),
        ("cat", INK),
        ("similarity 0.90", INK),
        ("$dog$", ORANGE),
        ("similarity 0.50", INK),
        ("cat", INK),
        ("similarity -0.25", INK),
    ]
    assert [axes.spines["left"].get_visible() for axes in figure.axes] == [True, False, True, False]


def test_a_neighbour_that_shares_a_label_is_right_and_numbers_are_never_wrong():
    targets = np.array([[1, 1, 0], [0, 0, 1]], np.float32)
    split = ArraySplit(np.zeros((2, 8, 8, 1), np.uint8), targets, "test")
    query = Tile(Image.new("L", (8, 8)), [Caption("mine")])
    found, cosines = np.array([[0, 1]]), np.array([[0.9, 0.5]], np.float32)
    figure = neighbours_figure([query], split, found, cosines, Multilabel(("a", "b", "c")), [frozenset({"b"})])
    assert [text.get_color() for text in figure.texts if text.get_text() in ("a|b", "c")] == [INK, ORANGE]
    figure = neighbours_figure([query], split, found, cosines, Regression(("x", "y", "z")), [frozenset("x")])
    assert ORANGE not in [text.get_color() for text in figure.texts]
