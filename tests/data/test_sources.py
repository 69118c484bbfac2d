"""Arrays and built-in sets open as one `Data`, and every way to get them wrong has its sentence."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitrail.data import ArraySplit, open_data
from vitrail.data.holdout import stratify
from vitrail.errors import UserError


def put(path: Path, colour: str | int = "red", size: tuple[int, int] = (6, 4)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L" if isinstance(colour, int) else "RGB", size[::-1], colour).save(path)
    return path


def put_many(folder: Path, **counts: int) -> Path:
    for name, count in counts.items():
        for i in range(count):
            put(folder / name / f"{i:03}.png")
    return folder


# Paths and settings


def test_a_missing_source_is_a_user_error_with_the_nearest_name(tmp_path):
    with pytest.raises(UserError, match=r"There is no data set 'fashon-mnist'\. Did you mean 'fashion-mnist'\?"):
        open_data("fashon-mnist")
    with pytest.raises(UserError, match="There is no data") as error:
        open_data(tmp_path / "nothing")
    assert "Did you mean" not in str(error.value)


def test_another_kind_of_file_is_a_user_error(tmp_path):
    path = tmp_path / "data.txt"
    path.write_text("a,b")
    with pytest.raises(UserError, match=r"data\.txt is not a data set\. It must be a folder"):
        open_data(path)


@pytest.mark.parametrize("fraction", [0, 1, -0.1, 20, float("nan")])
def test_a_val_fraction_outside_0_to_1_is_a_user_error(fraction):
    with pytest.raises(UserError, match="'val_fraction' must be above 0 and below 1"):
        open_data("digits", val_fraction=fraction)


def test_a_negative_seed_is_a_user_error():
    with pytest.raises(UserError, match="'seed' must be at least 0"):
        open_data("digits", seed=-1)


def test_sources_need_no_torch():
    code = "import sys, vitrail.data as d; d.open_data('digits'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# The stratified split


def test_a_stratified_split_holds_out_the_same_share_of_every_class():
    targets = np.random.default_rng(0).permutation(np.repeat(np.arange(5), [1, 2, 3, 10, 100]))
    keep, held = stratify(targets, 0.2, seed=3)
    assert np.bincount(targets[held], minlength=5).tolist() == [0, 1, 1, 2, 20]
    assert sorted([*keep, *held]) == list(range(116))
    assert (np.diff(keep) > 0).all()
    assert (np.diff(held) > 0).all()
    keep, _ = stratify(targets, 0.999, seed=3)
    assert np.bincount(targets[keep], minlength=5).tolist() == [1] * 5


def test_a_stratified_split_is_the_same_on_every_machine():
    _, held = stratify(np.arange(40) % 2, 0.25, seed=0)
    assert held.tolist() == [4, 8, 9, 12, 13, 15, 23, 26, 33, 38]


# Arrays


def npz(tmp_path: Path, **arrays: object) -> Path:
    path = tmp_path / "some.npz"
    np.savez(path, **arrays)
    return path


def pixels(n: int, *shape: int, top: int = 256) -> np.ndarray:
    return np.random.default_rng(n).integers(0, top, (n, *shape), dtype=np.uint8)


def test_an_npz_with_splits_gives_its_own_pixels(tmp_path):
    x, y = pixels(6, 5, 4, 3), np.array([0, 1, 2, 0, 1, 2])
    path = npz(tmp_path, x_train=x, y_train=y, x_val=x[:3], y_val=y[:3], x_test=x[3:4], y_test=y[3:4])
    data = open_data(path)
    assert (data.name, data.classes, data.size, data.channels) == ("some", ("0", "1", "2"), (5, 4), 3)
    train = data.splits["train"]
    assert isinstance(train, ArraySplit)
    assert np.array_equal(train.pixels, x)
    assert np.array_equal(train.image(2), x[2])
    assert train.name(2) == "some/train/2"
    assert train.targets.tolist() == y.tolist()
    assert [len(split) for split in data.splits.values()] == [6, 3, 1]


@pytest.mark.parametrize(("x", "y"), [("images", "labels"), ("X", "y"), ("x_train", "y_train")])
def test_an_npz_without_splits_is_split(tmp_path, x, y):
    data = open_data(npz(tmp_path, **{x: pixels(20, 3, 3), y: np.arange(20) % 2}), val_fraction=0.25)
    assert np.bincount(data.splits["train"].targets).tolist() == [8, 8]
    assert data.splits["val"].image(0).shape == (3, 3, 1)


def test_class_names_come_from_the_file_or_the_labels(tmp_path):
    x = pixels(4, 3, 3)
    named = npz(tmp_path, images=x, labels=np.array([1, 1, 0, 0], dtype=np.uint8), classes=np.array(["no", "yes"]))
    assert open_data(named).classes == ("no", "yes")
    text = open_data(npz(tmp_path, images=x, labels=np.array(["b", "b", "a", "a"])))
    assert text.classes == ("a", "b")
    assert sorted(text.splits["train"].targets.tolist()) == [0, 1]
    both = npz(tmp_path, x_train=x, y_train=np.array([b"b", b"a", b"b", b"a"]), classes=np.array(["b", "a"]))
    assert open_data(both).classes == ("b", "a")
    gaps = open_data(npz(tmp_path, images=x, labels=np.array([10, 10, 9, 9])))
    assert gaps.classes == ("9", "10")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.array([0, 0.5, 1.0], dtype=np.float32), [0, 128, 255]),
        (np.array([0, 0.2, 0.5], dtype=np.float64), [0, 51, 128]),
        (np.array([0, 8, 16]), [0, 128, 255]),
        (np.array([0, 8.0, 16.0]), [0, 128, 255]),
        (np.array([0, 100, 250]), [0, 100, 250]),
        (np.array([0, 100, 250], dtype=np.uint16), [0, 100, 250]),
        (np.array([0, 32768, 65535], dtype=np.uint16), [0, 32768, 65535]),
        (np.array([0, 32768, 65535], dtype=">u2"), [0, 32768, 65535]),
        (np.array([False, True, True]), [0, 255, 255]),
        (np.array([0, 8, 16], dtype=np.uint8), [0, 8, 16]),
        (np.array([0, 0, 0]), [0, 0, 0]),
    ],
)
def test_pixel_values_are_brought_to_bytes_or_keep_their_sixteen_bits(tmp_path, values, expected):
    x = np.stack([values[None]] * 2)
    y = np.array([0, 1])
    data = open_data(npz(tmp_path, x_train=x, y_train=y, x_val=x, y_val=y))
    assert data.splits["train"].image(0)[0, :, 0].tolist() == expected


def test_an_unusual_range_is_scaled_by_the_training_images_and_said(tmp_path, caplog):
    y = np.array([0, 1])
    x_train, x_val = np.full((2, 1, 1), 16), np.array([8, 32]).reshape(2, 1, 1)
    with caplog.at_level(logging.INFO, "vitrail"):
        data = open_data(npz(tmp_path, x_train=x_train, y_train=y, x_val=x_val, y_val=y))
    assert data.splits["val"].pixels.ravel().tolist() == [128, 255]
    assert "pixel values are scaled from 0..16 to 0..255" in caplog.text


X, Y = pixels(4, 3, 3), np.array([0, 1, 0, 1])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x_train": X, "y_train": Y[:3]}, "one label per image"),
        ({"x_train": X, "y_train": Y[:, None]}, "must have the shape"),
        ({"x_train": X[0], "y_train": Y}, "must have the shape"),
        ({"x_train": pixels(4, 3, 8, 8), "y_train": Y}, r"must have the shape .* they have \(4, 3, 8, 8\)"),
        ({"x_train": X, "y_train": Y - 1}, "labels must be 0 or more, but one is -1"),
        ({"x_train": X, "y_train": Y * 1j}, "labels must be integers from 0 or text, but they are complex128"),
        ({"x_train": np.where(X > 9, np.nan, 0.5), "y_train": Y}, "negative or NaN"),
        ({"x_train": X / 255 - 0.5, "y_train": Y}, "negative or NaN"),
        ({"x_train": X * 16.0, "y_train": Y}, "floats must be from 0 to 1 or from 0 to 255"),
        ({"x_train": X, "y_train": Y, "x_val": X / 255, "y_val": Y}, "one numeric type"),
        ({"x_train": X.astype(str), "y_train": Y}, "one numeric type"),
        ({"x_train": X}, "must contain both x_train and y_train"),
        ({"x_train": X, "y_train": Y, "y_test": Y}, "must contain both x_test and y_test"),
        ({"pictures": X, "y": Y}, "it contains pictures, y"),
        ({"x_train": X, "y_train": Y, "classes": np.array(["one"])}, "there are only 1 class names"),
        ({"x_train": X, "y_train": Y, "classes": np.array(["a", "a"])}, "must be unique"),
        ({"x_train": X, "y_train": Y, "classes": np.array([3, 4])}, "classes must be text, but they are int64"),
        ({"x_train": X, "y_train": np.array(list("abca")), "classes": np.array(["a", "b"])}, "the label 'c'"),
        ({"x_train": X, "y_train": Y * 0}, "has only one class, '0'"),
        ({"x_train": X, "y_train": Y, "x_val": X, "y_val": Y + 1}, "The class '2' is in the val split"),
        ({"x_train": X, "y_train": Y, "x_val": X[:0], "y_val": Y[:0]}, "The val split .* has no images"),
        ({"x_train": X[:0], "y_train": Y[:0]}, "The train split .* has no images"),
        ({"x_train": X[:0] / 2, "y_train": Y[:0]}, "The train split .* has no images"),
        ({"x_train": np.array([X, None], dtype=object), "y_train": Y}, "Python objects"),
    ],
)
def test_what_is_wrong_with_an_npz_is_said(tmp_path, arrays, message):
    with pytest.raises(UserError, match=message):
        open_data(npz(tmp_path, **arrays))


def test_a_damaged_npz_is_a_user_error(tmp_path):
    path = npz(tmp_path, x_train=X, y_train=Y)
    whole = path.read_bytes()
    for content in (whole[:100], whole[:400] + bytes(50) + whole[450:], b"", b"words"):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"some\.npz"):
            open_data(path)
    with path.open("wb") as file:
        np.save(file, X)
    with pytest.raises(UserError, match="a single array"):
        open_data(path)


# Built-in sets


def test_a_built_in_name_comes_before_a_folder_of_that_name(tmp_path, monkeypatch, caplog):
    put_many(tmp_path / "digits", cat=3, dog=3)
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.INFO, "vitrail"):
        assert len(open_data("digits").classes) == 10
    assert "Write ./digits for the folder" in caplog.text
    assert open_data("./digits").classes == ("cat", "dog")
