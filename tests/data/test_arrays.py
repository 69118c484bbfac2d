"""Arrays in `.npy` files find their labels by one rule and are mapped into memory, not read."""

from __future__ import annotations

import numpy as np
import pytest

from vitrail.data import open_data
from vitrail.data.dataset import MappedSplit
from vitrail.data.loader import TrainBatches, batches
from vitrail.data.preprocess import Preprocess
from vitrail.errors import UserError


def images(n: int = 10, *shape: int) -> np.ndarray:
    return np.random.default_rng(n).integers(0, 256, (n, *(shape or (8, 8))), dtype=np.uint8)


def labels(n: int = 10) -> np.ndarray:
    return np.arange(n) % 2


@pytest.mark.parametrize(
    ("x", "y"),
    [
        ("x_train", "y_train"),
        ("X", "y"),
        ("X_train", "Y_train"),
        ("images", "labels"),
        ("train-images", "train-labels"),
        ("Images", "Labels"),
        ("my_image_set", "my_label_set"),
    ],
)
def test_labels_lie_in_the_file_of_the_matching_name(tmp_path, x, y):
    np.save(tmp_path / f"{x}.npy", images())
    np.save(tmp_path / f"{y}.npy", labels())
    data = open_data(tmp_path / f"{x}.npy", val_fraction=0.2)
    assert (data.name, data.classes, data.size, data.channels) == (x, ("0", "1"), (8, 8), 1)
    assert {split: len(found) for split, found in data.splits.items()} == {"train": 8, "val": 2}
    for found in data.splits.values():
        for i in range(len(found)):
            row = int(found.name(i).rpartition("/")[2])
            assert np.array_equal(found.image(i)[..., 0], images()[row])
            assert found.targets[i] == row % 2


def test_a_folder_of_pairs_has_their_splits_and_classes(tmp_path):
    for split, n in (("train", 10), ("valid", 4), ("test", 6)):
        np.save(tmp_path / f"x_{split}.npy", images(n, 8, 6, 3))
        np.save(tmp_path / f"y_{split}.npy", np.array(["cat", "dog"])[labels(n)])
    np.save(tmp_path / "classes.npy", np.array(["dog", "cat"]))
    data = open_data(tmp_path)
    assert (data.name, data.classes, data.size, data.channels) == (tmp_path.name, ("dog", "cat"), (8, 6), 3)
    assert {split: len(found) for split, found in data.splits.items()} == {"train": 10, "val": 4, "test": 6}
    assert data.splits["test"].targets.tolist() == [1, 0, 1, 0, 1, 0]


def test_a_file_of_a_folder_with_splits_is_taken_alone_and_says_so(tmp_path, caplog):
    for split in ("train", "test"):
        np.save(tmp_path / f"x_{split}.npy", images())
        np.save(tmp_path / f"y_{split}.npy", labels())
    with caplog.at_level("INFO", "vitrail"):
        assert "test" not in open_data(tmp_path / "x_train.npy").splits
    assert "x_test.npy: give the folder" in caplog.text


def test_pixels_stay_in_the_file_and_batches_are_those_of_arrays_in_memory(tmp_path):
    np.save(tmp_path / "x.npy", images(40))
    np.save(tmp_path / "y.npy", labels(40))
    np.savez(tmp_path / "both.npz", x=images(40), y=labels(40))
    mapped, loaded = (open_data(tmp_path / name).splits for name in ("x.npy", "both.npz"))
    assert isinstance(mapped["train"], MappedSplit)
    assert isinstance(mapped["train"].pixels, np.memmap)
    for size in ((8, 8), (6, 6)):  # as they are stored, and resized
        preprocess = Preprocess(size, 1)
        for one, other in zip(
            TrainBatches(mapped["train"], preprocess, 8, seed=3).epoch(1),
            TrainBatches(loaded["train"], preprocess, 8, seed=3).epoch(1),
            strict=True,
        ):
            assert all(map(np.array_equal, one, other))
        for one, other in zip(
            batches(mapped["val"], preprocess, 3), batches(loaded["val"], preprocess, 3), strict=True
        ):
            assert all(map(np.array_equal, one, other))


def test_other_numbers_than_bytes_are_scaled_as_in_npz(tmp_path):
    np.save(tmp_path / "x.npy", (images() / 255).astype(np.float32))
    np.save(tmp_path / "y.npy", labels())
    assert np.array_equal(open_data(tmp_path).splits["train"].pixels.max(), images().max())


def test_labels_that_are_not_there_are_asked_for_by_name(tmp_path):
    np.save(tmp_path / "x_train.npy", images())
    np.save(tmp_path / "pictures.npy", images())
    with pytest.raises(UserError, match=r"There is no .*y_train\.npy"):
        open_data(tmp_path / "x_train.npy")
    with pytest.raises(UserError, match=r"x_train\.npy has no labels: y_train\.npy must be"):
        open_data(tmp_path)
    with pytest.raises(UserError, match="neither word: rename it"):
        open_data(tmp_path / "pictures.npy")


def test_two_files_for_one_split_are_a_user_error(tmp_path):
    for name in ("x", "images"):
        np.save(tmp_path / f"{name}.npy", images())
        np.save(tmp_path / f"{ {'x': 'y', 'images': 'labels'}[name] }.npy", labels())
    with pytest.raises(UserError, match="two files of train images"):
        open_data(tmp_path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (np.array([{}, {}], dtype=object), "could run code"),
        (images(9), r"one label per image"),
        (images(10, 5, 8, 8), r"the shape \(N, height, width\)"),
    ],
)
def test_arrays_of_the_wrong_kind_are_user_errors(tmp_path, content, reason):
    np.save(tmp_path / "x.npy", content, allow_pickle=True)
    np.save(tmp_path / "y.npy", labels())
    with pytest.raises(UserError, match=reason):
        open_data(tmp_path / "x.npy")


@pytest.mark.parametrize("keep", [0, 5, 200])
def test_a_cut_file_is_a_user_error(tmp_path, keep):
    np.save(tmp_path / "x.npy", images())
    np.save(tmp_path / "y.npy", labels())
    path = tmp_path / "x.npy"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"x\.npy is not a complete \.npy file"):
        open_data(path)


def test_class_folders_with_an_array_beside_them_stay_class_folders(digits, tmp_path):
    folder = tmp_path / "digits"
    folder.symlink_to(digits)
    assert len(open_data(folder).classes) == 10
