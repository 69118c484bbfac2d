"""Captions of the contact sheet."""

from __future__ import annotations

from vitrail.data.audit.contact_sheet import wrap


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
