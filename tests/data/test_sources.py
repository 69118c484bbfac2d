"""Folders, arrays and built-in sets open as one `Data`, and every way to get them wrong has its sentence."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitrail.data import ArraySplit, Data, FileSplit, open_data
from vitrail.data.sources import stratify
from vitrail.errors import UserError
from vitrail.tasks import Multiclass


def put(path: Path, colour: str | int = "red", size: tuple[int, int] = (6, 4)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L" if isinstance(colour, int) else "RGB", size[::-1], colour).save(path)
    return path


def put_many(folder: Path, **counts: int) -> Path:
    for name, count in counts.items():
        for i in range(count):
            put(folder / name / f"{i:03}.png")
    return folder


def names(data: Data, split: str, root: Path) -> list[str]:
    found = data.splits[split]
    return [Path(found.name(i)).relative_to(root).as_posix() for i in range(len(found))]


# Folders


def test_a_folder_with_splits_gives_their_files_in_order(tmp_path):
    put_many(tmp_path / "train", cat=3, dog=2)
    put_many(tmp_path / "val", dog=1, cat=1)
    data = open_data(tmp_path)
    assert data.name == tmp_path.name
    assert data.classes == ("cat", "dog")
    assert list(data.splits) == ["train", "val"]
    train = data.splits["train"]
    assert isinstance(train, FileSplit)
    assert train.targets.tolist() == [0, 0, 0, 1, 1]
    assert train.targets.dtype == np.int64
    assert names(data, "train", tmp_path)[2:4] == ["train/cat/002.png", "train/dog/000.png"]
    assert data.splits["val"].targets.tolist() == [0, 1]
    assert data.unreadable == ()


@pytest.mark.parametrize("spelling", ["val", "valid", "validation", "Val"])
def test_every_spelling_of_the_validation_folder_is_known(tmp_path, spelling):
    put_many(tmp_path / "train", cat=2, dog=2)
    put_many(tmp_path / spelling, cat=1, dog=1)
    assert len(open_data(tmp_path).splits["val"]) == 2


def test_the_test_split_serves_for_validation_where_there_is_no_other_and_that_is_said(tmp_path, caplog):
    put_many(tmp_path / "train", cat=2, dog=2)
    put_many(tmp_path / "test", cat=1, dog=1)
    with caplog.at_level(logging.INFO, "vitrail"):
        data = open_data(tmp_path)
    assert data.splits["val"] is data.splits["test"]
    assert len(data.splits["train"]) == 4
    assert "using its test split for validation" in caplog.text


def test_three_splits_stay_three(tmp_path):
    for split, count in (("train", 3), ("val", 2), ("test", 1)):
        put_many(tmp_path / split, cat=count, dog=count)
    data = open_data(tmp_path)
    assert {split: len(found) for split, found in data.splits.items()} == {"train": 6, "val": 4, "test": 2}


@pytest.mark.parametrize("where", ["train", "."])
def test_a_folder_without_a_split_is_split_class_by_class(tmp_path, where):
    put_many(tmp_path / where, cat=10, dog=20)
    data = open_data(tmp_path, val_fraction=0.3)
    assert np.bincount(data.splits["val"].targets).tolist() == [3, 6]
    assert np.bincount(data.splits["train"].targets).tolist() == [7, 14]
    train, val = names(data, "train", tmp_path), names(data, "val", tmp_path)
    assert train == sorted(train)
    assert val == sorted(val)
    assert len({*train, *val}) == 30


def test_the_held_out_files_depend_on_the_seed_alone(tmp_path):
    put_many(tmp_path, cat=20, dog=20)
    held = [names(open_data(tmp_path, seed=seed), "val", tmp_path) for seed in (0, 0, 1)]
    assert held[0] == held[1] != held[2]


def test_images_are_found_at_any_depth_by_any_case_of_the_extension(tmp_path):
    for name in ("cat/b.JPG", "cat/deep/er/a.png", "cat/B.Png", "dog/a.jpeg", "dog/b.webp"):
        put(tmp_path / "train" / name)
        put(tmp_path / "val" / name)
    for name in ("cat/.hidden.png", "cat/.ipynb_checkpoints/a.png", ".git/a.png"):
        put(tmp_path / "train" / name)
    (tmp_path / "train/cat/notes.txt").write_text("not an image")
    data = open_data(tmp_path)
    assert data.classes == ("cat", "dog")
    expected = ["cat/B.Png", "cat/b.JPG", "cat/deep/er/a.png", "dog/a.jpeg", "dog/b.webp"]
    assert names(data, "train", tmp_path / "train") == expected


def test_links_to_folders_are_followed_but_not_in_circles(tmp_path):
    put_many(tmp_path / "elsewhere", big=3)
    root = put_many(tmp_path / "data", cat=2)
    (root / "dog").symlink_to(tmp_path / "elsewhere" / "big", target_is_directory=True)
    (root / "cat" / "again").symlink_to(root / "cat", target_is_directory=True)
    data = open_data(root)
    counts = sum(np.bincount(split.targets) for split in data.splits.values())
    assert counts.tolist() == [2, 3]


def test_a_class_may_be_called_train(tmp_path):
    put_many(tmp_path, bus=4, train=4)
    assert open_data(tmp_path).classes == ("bus", "train")


def test_size_is_the_median_and_channels_are_those_of_all_images(tmp_path):
    for i, size in enumerate([(10, 20), (30, 40), (500, 60)]):
        put(tmp_path / f"{'cat' if i else 'dog'}/{i}.png", 7, size)
    put(tmp_path / "dog/3.png", 7, (30, 40))
    data = open_data(tmp_path)
    assert data.size == (30, 40)
    assert data.channels == 1
    assert data.splits["train"].image(0).shape[2] == 1
    put(tmp_path / "dog/4.png", "red", (30, 40))
    data = open_data(tmp_path)
    assert data.channels == 3
    assert {split.image(i).shape[2] for split in data.splits.values() for i in range(len(split))} == {3}


def test_a_single_image_of_a_class_stays_in_train(tmp_path):
    put_many(tmp_path, cat=5, rare=1)
    data = open_data(tmp_path, val_fraction=0.5)
    assert 1 in data.splits["train"].targets
    assert 1 not in data.splits["val"].targets


def test_few_unreadable_files_are_left_out_by_name(tmp_path, caplog):
    put_many(tmp_path / "train", cat=100, dog=100)
    put_many(tmp_path / "val", cat=1, dog=1)
    bad = tmp_path / "train/cat/007.png"
    bad.write_bytes(b"")
    data = open_data(tmp_path)
    assert data.unreadable == ((str(bad), "empty file"),)
    assert len(data.splits["train"]) == 199
    assert str(bad) not in [data.splits["train"].name(i) for i in range(199)]
    assert "1 of 202 images cannot be read and are left out" in caplog.text
    assert "007.png (empty file)" in caplog.text


def test_no_more_than_ten_unreadable_files_are_listed(tmp_path, caplog):
    put_many(tmp_path, cat=1, dog=1)
    for i in range(1198):
        (tmp_path / "cat" / f"copy{i:04}.png").symlink_to(tmp_path / "cat" / "000.png")
    for i in range(12):
        (tmp_path / "dog" / f"bad{i:02}.png").write_bytes(b"")
    open_data(put_many(tmp_path, dog=2))
    assert caplog.text.count("(empty file)") == 10
    assert caplog.text.rstrip().endswith("and 2 more.")


def test_more_than_one_percent_unreadable_stops(tmp_path):
    put_many(tmp_path, cat=50, dog=49)
    for i in range(4):
        (tmp_path / "dog" / f"bad{i}.png").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"4 of 103 images \(3\.9%\)") as error:
        open_data(tmp_path)
    assert str(error.value).count("(not an image)") == 3
    assert "and 1 more. Repair or remove them." in str(error.value)


def test_a_class_whose_only_image_is_unreadable_stops(tmp_path):
    put_many(tmp_path, cat=150, dog=150)
    (tmp_path / "elk").mkdir()
    (tmp_path / "elk/1.png").write_bytes(b"")
    with pytest.raises(UserError, match="No image of the class 'elk'"):
        open_data(tmp_path)


def test_what_is_wrong_with_a_folder_is_said(tmp_path):
    def complains(about: str) -> None:
        with pytest.raises(UserError) as error:
            open_data(tmp_path)
        assert about in str(error.value)

    complains("has no images. It must hold one folder of images per class")
    image = put(tmp_path / "1.png")
    complains("holds images but no class folders: every class needs its own folder")
    image.unlink()
    put_many(tmp_path / "train", cat=2)
    complains("has only one class, 'cat'")
    put_many(tmp_path / "train", dog=2)
    (tmp_path / "val").mkdir()
    complains(f"{tmp_path / 'val'} has no images")
    put_many(tmp_path / "val", dog=2)
    (tmp_path / "val/cat").mkdir()
    complains(f"The class folder {tmp_path / 'val' / 'cat'} has no images")
    put_many(tmp_path / "val", cat=1, elk=1)
    complains("The class 'elk' is in the val split")
    put_many(tmp_path / "train", elk=1)
    put_many(tmp_path / "test", yak=1)
    complains("The class 'yak' is in the test split")
    put_many(tmp_path / "train", yak=1)
    open_data(tmp_path)
    put_many(tmp_path / "valid", cat=1)
    complains("has two val splits, val and valid")


def test_splits_without_train_cannot_be_trained_on_but_evaluated(tmp_path):
    put_many(tmp_path / "test", cat=1, dog=1)
    with pytest.raises(UserError, match="has no train split, only test"):
        open_data(tmp_path)
    data = open_data(tmp_path, model=Multiclass(("ant", "cat", "dog")))
    assert data.splits["test"].targets.tolist() == [1, 2]


def test_one_image_per_class_leaves_nothing_to_hold_out(tmp_path):
    with pytest.raises(UserError, match="too few to hold out"):
        open_data(put_many(tmp_path, cat=1, dog=1))


def test_images_beside_class_folders_are_mentioned(tmp_path, caplog):
    put(tmp_path / "stray.png")
    open_data(put_many(tmp_path, cat=2, dog=2))
    assert "1 images in" in caplog.text


def test_a_forbidden_folder_is_a_user_error(tmp_path):
    put_many(tmp_path, cat=2, dog=2)
    (tmp_path / "cat").chmod(0)
    if os.access(tmp_path / "cat", os.R_OK):
        pytest.skip("this user may read everything")
    with pytest.raises(UserError, match="cannot be read: Permission denied"):
        open_data(tmp_path)


def test_the_classes_of_a_model_fix_the_order(tmp_path):
    put_many(tmp_path / "train", cat=2, dog=1)
    put_many(tmp_path / "val", dog=1)
    data = open_data(tmp_path, model=Multiclass(("dog", "elk", "cat")))
    assert data.classes == ("dog", "elk", "cat")
    assert data.splits["train"].targets.tolist() == [2, 2, 0]
    assert data.splits["train"].targets.dtype == np.int64
    with pytest.raises(UserError, match=r"a class 'dog' that the model does not know\. Did you mean 'dogs'\?"):
        open_data(tmp_path, model=Multiclass(("cat", "dogs")))


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
    with pytest.raises(UserError, match="'val_fraction' must be between 0 and 1"):
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
