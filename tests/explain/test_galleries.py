from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from vitrail.charts.style import GREY, INK, ORANGE, save
from vitrail.data.dataset import ArraySplit
from vitrail.explain.galleries import gallery, tiles
from vitrail.tasks import Multiclass

TASK = Multiclass(("cat", "dog", "owl"))


def split(count: int, targets: Any) -> ArraySplit:
    pixels = np.random.default_rng(0).integers(0, 256, (count, 8, 8, 1), dtype=np.uint8)
    return ArraySplit(pixels, np.asarray(targets), "test")


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.texts]


def test_captions_are_coloured_by_their_tone():
    right, wrong = tiles(TASK, split(2, [0, 2]), np.log([[0.7, 0.2, 0.1]] * 2), np.array([0, 2]), [0, 1])
    assert [(c.text, c.colour) for c in right.captions] == [("right: cat 70.0%", INK), ("next: dog 20.0%", GREY)]
    assert [(c.text, c.colour) for c in wrong.captions] == [("true: owl 10.0%", INK), ("predicted: cat 70.0%", ORANGE)]


@pytest.mark.filterwarnings("ignore:Glyph")
@pytest.mark.parametrize("name", ["$a_b$", "a" * 300, "a very long name " * 20, "猫と犬", "\\frac{", "a\nb"])
def test_any_name_can_stand_under_a_picture(tmp_path: Path, name: str):
    task = Multiclass((name, "dog", "owl"))
    targets = np.array([0, 1] * 6)
    outputs = np.random.default_rng(0).normal(size=(12, 3))
    figure = gallery(tiles(task, split(12, targets), outputs, targets, range(12)), "Title", "note")
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
    figure = gallery(tiles(TASK, images, outputs, targets, [3, 1, 9]), "Worst predictions", "of 10 images")
    assert len(figure.axes) == 3
    assert texts(figure)[:2] == ["Worst predictions", "of 10 images"]
    drawn = [np.asarray(axes.images[0].get_array()) for axes in figure.axes]
    for pixels, number in zip(drawn, (3, 1, 9), strict=True):
        np.testing.assert_array_equal(pixels, images.pixels[number, :, :, 0])
