from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image
from vitrail.evaluate.metrics import measure, measure_labels, measure_values

from vitrail.charts.style import INK, ORANGE, save
from vitrail.data.dataset import ArraySplit
from vitrail.data.preprocess import Preprocess
from vitrail.errors import UserError
from vitrail.explain.galleries import captions, gallery, least_certain, losses, margins, most_wrong
from vitrail.models.vit import ViTConfig
from vitrail.weights import Card

CONFIG = ViTConfig(width=8, depth=1, heads=1, mlp=8, patch=4, img_size=(8, 8), channels=1, classes=3)


def card(**changes: Any) -> Card:
    made = Card(model="vit", config=CONFIG, classes=("cat", "dog", "owl"), preprocess=Preprocess((8, 8), 1))
    return replace(made, **changes)


LABELS = card(task="multilabel", thresholds=(0.5, 0.5, 0.3))
VALUES = card(task="regression", classes=("age", "height"), target_mean=(40.0, 1.7), target_std=(10.0, 0.1))


def split(count: int, targets: Any) -> ArraySplit:
    pixels = np.random.default_rng(0).integers(0, 256, (count, 8, 8, 1), dtype=np.uint8)
    return ArraySplit(pixels, np.asarray(targets), "test")


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.texts]


def test_losses_are_those_that_evaluate_averages():
    random = np.random.default_rng(0)
    outputs, classes = random.normal(size=(20, 3)), random.integers(0, 3, 20)
    assert losses(card(), outputs, classes).mean() == pytest.approx(measure(outputs, classes, "abc").loss)
    labels = (random.random((20, 3)) < 0.4).astype(np.float32)
    expected = measure_labels(outputs, labels, "abc", LABELS.thresholds).loss
    assert losses(LABELS, outputs, labels).mean() == pytest.approx(3 * expected)  # there, the mean over labels
    numbers = random.normal(size=(20, 2)) * (10, 0.1) + (40, 1.7)
    expected = measure_values(outputs[:, :2], numbers, "ab", VALUES.target_mean, VALUES.target_std).loss
    assert (losses(VALUES, outputs[:, :2], numbers) ** 2).mean() == pytest.approx(expected)


def test_most_wrong_are_wrong_answers_by_their_loss():
    outputs = np.array([[5, 0, 0], [0, 1, 0], [0, 9, 0], [0, 0.1, 0.0]])
    assert most_wrong(card(), outputs, np.array([0, 0, 2, 1])).tolist() == [2, 1]
    assert most_wrong(card(), outputs, np.array([0, 0, 2, 1]), count=1).tolist() == [2]
    assert not len(most_wrong(card(), outputs, np.array([0, 1, 1, 1])))


def test_labels_are_wrong_by_their_thresholds():
    outputs = np.array([[3.0, -3, -3], [3, -3, -0.5], [-6, -3, -3]])  # -0.5 is 38 %: above the threshold of the owl
    targets = np.array([[1, 0, 0], [1, 0, 0], [1, 0, 0]], np.float32)
    assert most_wrong(LABELS, outputs, targets).tolist() == [2, 1]


def test_numbers_are_most_wrong_by_their_errors_whatever_their_units():
    targets = np.array([[40, 1.7], [40, 1.7], [60, 1.7]])
    outputs = np.array([[0.5, 0], [0, 3], [0, 0]])  # off by 5 years, by 30 cm, by 20 years
    assert most_wrong(VALUES, outputs, targets).tolist() == [1, 2, 0]


def test_least_certain_are_the_smallest_margins():
    outputs = np.log([[0.5, 0.3, 0.2], [0.4, 0.38, 0.22], [0.9, 0.05, 0.05]])
    assert margins(card(), outputs) == pytest.approx([0.2, 0.02, 0.85])
    assert least_certain(card(), outputs).tolist() == [1, 0, 2]
    assert least_certain(card(), outputs, count=1).tolist() == [1]
    chances = np.array([[0.9, 0.1, 0.29], [0.6, 0.1, 0.9]])
    assert margins(LABELS, np.log(chances / (1 - chances))) == pytest.approx([0.01, 0.1])
    with pytest.raises(UserError, match="how certain"):
        least_certain(VALUES, np.zeros((2, 2)))


def test_captions_say_what_is_true_and_what_was_said():
    say = captions(card(), np.log([[0.7, 0.2, 0.1]] * 2), np.array([0, 2]))
    assert [line[:2] for line in say(0)] == [("right: cat 70.0%", INK), ("next: dog 20.0%", "#6B6B6B")]
    assert [line[:2] for line in say(1)] == [("true: owl 10.0%", INK), ("said: cat 70.0%", ORANGE)]
    chances = np.array([[0.9, 0.2, 0.4]])
    say = captions(LABELS, np.log(chances / (1 - chances)), np.array([[1.0, 1, 0]]))
    assert [text for text, *_ in say(0)] == ["right: cat 90%", "missed: dog 20%", "wrongly: owl 40%"]
    say = captions(VALUES, np.array([[0.0, 3]]), np.array([[41.0, 1.7]]))
    assert [text for text, *_ in say(0)] == ["true: height 1.7", "said: height 2"]


def test_an_image_without_any_label_has_a_caption():
    chances = np.array([[0.1, 0.2, 0.1]])
    say = captions(LABELS, np.log(chances / (1 - chances)), np.zeros((1, 3)))
    assert [text for text, *_ in say(0)] == ["right: (no label)"]


@pytest.mark.filterwarnings("ignore:Glyph")
@pytest.mark.parametrize("name", ["$a_b$", "a" * 300, "a very long name " * 20, "猫と犬", "\\frac{", "a\nb"])
def test_any_name_can_stand_under_a_picture(tmp_path: Path, name: str):
    named = card(classes=(name, "dog", "owl"))
    targets = np.array([0, 1] * 6)
    outputs = np.random.default_rng(0).normal(size=(12, 3))
    figure = gallery(named, split(12, targets), outputs, targets, np.arange(12), "Title", "note")
    path = tmp_path / "gallery.png"
    save(figure, path)
    with Image.open(path) as image:
        width, height = image.size
    assert width < 150 * 11.6  # nothing stands out at the right: the page is as wide as its eight pictures
    assert height > 300
    figure.draw_without_rendering()
    pictures = sorted({round(axes.get_position().x0, 4) for axes in figure.axes})
    inches = (pictures[1] - pictures[0]) * figure.get_figwidth()
    for text in figure.texts[2:]:
        assert text.get_window_extent().width / figure.dpi < inches


def test_a_gallery_has_a_picture_for_each_number():
    targets = np.array([0, 1, 2, 0, 1, 2, 0, 1, 2, 0])
    outputs = np.random.default_rng(0).normal(size=(10, 3))
    images = split(10, targets)
    figure = gallery(card(), images, outputs, targets, np.array([3, 1, 9]), "Most wrong", "of 10 images")
    assert len(figure.axes) == 3
    assert texts(figure)[:2] == ["Most wrong", "of 10 images"]
    drawn = [np.asarray(axes.images[0].get_array()) for axes in figure.axes]
    for pixels, number in zip(drawn, (3, 1, 9), strict=True):
        np.testing.assert_array_equal(pixels, images.pixels[number, :, :, 0])
