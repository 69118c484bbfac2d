"""Images are verified once per version."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from privileges import unprivileged

from vitrail.data import open_data, verify
from vitrail.data.images import inspect_image
from vitrail.errors import UserError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def photos(tmp_path):
    for label, value in (("cat", 0), ("dog", 200)):
        (tmp_path / "photos" / label).mkdir(parents=True)
        for i in range(4):
            Image.fromarray(np.full((6, 5 + i), value, np.uint8)).save(tmp_path / "photos" / label / f"{i}.png")
    return tmp_path / "photos"


@pytest.fixture
def inspected(monkeypatch):
    """The files that are inspected."""
    files: list[str] = []

    def counted(path):
        files.append(path.name)
        return inspect_image(path)

    monkeypatch.setattr(verify, "inspect_image", counted)
    return files


def opened(source):
    data = open_data(source)
    return data.size, data.channels, data.bits, [split.paths for split in data.splits.values()]


def test_the_second_opening_decodes_nothing(photos, inspected):
    first = opened(photos)
    assert len(inspected) == 8
    assert opened(photos) == first
    assert len(inspected) == 8


def test_a_table_shares_what_is_known_of_its_files(photos, inspected, tmp_path):
    open_data(photos)
    rows = [f"{path},{path.parent.name}" for path in sorted(photos.rglob("*.png"))]
    (tmp_path / "table.csv").write_text("\n".join(["image,label", *rows]))
    open_data(tmp_path / "table.csv")
    assert len(inspected) == 8


def test_a_changed_file_is_verified_again(photos, inspected):
    open_data(photos)
    inspected.clear()
    path = photos / "dog" / "2.png"
    state = path.stat()
    path.write_bytes(path.read_bytes()[:-30].ljust(state.st_size, b"\0"))  # of the same size
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    with pytest.raises(UserError, match=r"1 of 8 images \(12.5%\) cannot be read"):
        open_data(photos)
    assert inspected == ["2.png"]
    with pytest.raises(UserError, match="cannot be read"):
        open_data(photos)
    assert inspected == ["2.png", "2.png"]


def test_a_damaged_memory_is_made_anew(photos, inspected, cache):
    open_data(photos)
    (cache / "verified.sqlite").write_bytes(b"SQLite format 3\0" + b"damaged" * 1000)
    for expected in (16, 24, 24):  # the second opening finds no database
        open_data(photos)
        assert len(inspected) == expected


def test_a_read_only_disk_is_no_failure(photos, inspected, cache):
    cache.mkdir()
    cache.chmod(0o500)
    first = unprivileged(opened, photos)
    assert unprivileged(opened, photos) == first
    assert len(inspected) == 16


def test_no_room_for_a_memory_is_no_failure(photos, inspected, cache):
    cache.write_text("a file, not a folder")
    assert opened(photos) == opened(photos)
    assert len(inspected) == 16


def test_an_image_that_moves_is_another_one(photos, inspected, tmp_path):
    open_data(photos)
    shutil.copytree(photos, tmp_path / "copy")
    open_data(tmp_path / "copy")
    assert len(inspected) == 16


def test_a_name_that_no_file_can_have_is_a_reason():
    (reason,) = verify.verify_files([Path("a\ud800.png")])
    assert "surrogates not allowed" in str(reason)
