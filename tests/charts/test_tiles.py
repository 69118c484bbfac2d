from __future__ import annotations

from matplotlib.colors import to_hex
from PIL import Image

from vitrail.charts.style import INK, ORANGE, PALE
from vitrail.charts.tiles import Caption, Section, Tile, sheet, wrap


def test_pictures_of_any_shape_fit_in_their_cells():
    images = [Image.new("RGB", size) for size in ((300, 20), (20, 300), (1, 1))]
    figure = sheet(Section("a", "b", [[Tile(image, [Caption("")], ORANGE) for image in images]]))
    figure.draw_without_rendering()
    assert len(figure.axes) == 3
    for axes in figure.axes:
        box = axes.get_window_extent()
        assert max(box.width, box.height) / figure.dpi < 1.26


def test_sections_stand_below_each_other():
    tile = Tile(Image.new("L", (8, 8)), [Caption("caption")])
    figure = sheet(Section("first", "one", [[tile, tile]]), Section("second", "two", [[tile], [tile]], ORANGE))
    texts = {text.get_text(): text for text in figure.texts}
    assert texts["first"].get_position()[1] > texts["second"].get_position()[1]
    assert (texts["first"].get_color(), texts["second"].get_color()) == (INK, ORANGE)
    assert len({round(axes.get_position().y0, 4) for axes in figure.axes}) == 3


def test_what_belongs_together_stands_on_one_ground():
    image = Image.new("L", (8, 8))
    figure = sheet(Section("a", "b", [[Tile(image, [Caption("x")], joined=True), Tile(image, [Caption("y")])]]))
    ground, first, second = (axes.get_position() for axes in figure.axes)
    assert to_hex(figure.axes[0].get_facecolor()) == PALE.lower()
    assert (round(ground.x0, 4), round(ground.x1, 4)) == (round(first.x0, 4), round(second.x1, 4))


def test_a_missing_picture_is_replaced_by_the_reason():
    figure = sheet(Section("a", "b", [[Tile("empty file", [Caption("x.png")])]]))
    assert [text.get_text() for text in figure.axes[0].texts] == ["empty file"]
    assert not figure.axes[0].images


def test_long_texts_lose_their_end_or_their_beginning():
    path = "a/folder/with/a/rather/long/path/that/ends/in/the_name_of_a_file.png"
    assert len(wrap(path, 2)) == len(wrap(path, 2, keep_end=True)) == 2
    assert wrap(path, 2)[0].startswith("a/folder")
    assert wrap(path, 2, keep_end=True)[0].startswith("…")
    assert wrap(path, 2, keep_end=True)[-1].endswith("file.png")


def test_captions_are_broken_between_words_and_are_no_wider_than_a_picture():
    path = "val/cat/a rather long name of a picture, from_the_summer-holidays.jpg"
    lines = wrap(path, 4, keep_end=True)
    assert len(lines) == 3
    assert " ".join(lines).replace("/ ", "/").replace("_ ", "_").replace("- ", "-") == path
    assert wrap(path, 2, keep_end=True)[-1] == lines[-1]
    assert wrap(path, 2, keep_end=True)[0].startswith("…")
    assert wrap("one two three four five six seven eight nine ten", 1)[0].endswith("…")
    (line,) = wrap("W" * 50, 2)
    assert 8 < len(line) < 30
