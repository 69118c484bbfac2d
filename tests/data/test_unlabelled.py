"""Every kind of source opens without labels, whether it has some or not, for a task that reads none."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from unlabelled import Unlabelled, greys, names, put, same, unlabelled

from vitrail import tasks
from vitrail.data import Data, open_data
from vitrail.data.cache import KeptSplit, once
from vitrail.data.dataset import MappedSplit
from vitrail.data.loader import ReadySplit, TrainBatches, batches
from vitrail.data.preprocess import Preprocess
from vitrail.errors import UserError
from vitrail.runs.run import Run

# Folders


def below(data: Data, split: str, root: Path) -> list[str]:
    return [Path(name).relative_to(root).as_posix() for name in names(data.splits[split])]


@pytest.mark.parametrize(
    "files",
    [
        ["1.png", "2.png", "3.png", "4.jpg"],
        ["cat/1.png", "cat/2.png", "dog/1.png"],
        ["1.png", "2.png", "cat/1.png", "cat/deep/er/2.png", "dog/.hidden/no.png", "dog/3.png", ".no.png"],
        ["train/1.png", "train/2.png", "train/sub/3.png"],
    ],
)
def test_a_folder_gives_all_images_below_it(tmp_path, files):
    put(tmp_path, *files)
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / "again").symlink_to(tmp_path, target_is_directory=True)
    data = unlabelled(tmp_path, val_fraction=0.3)
    assert list(data.splits) == ["train", "val"]
    found = below(data, "train", tmp_path) + below(data, "val", tmp_path)
    assert sorted(found) == sorted(file for file in files if "/." not in f"/{file}")


def test_the_split_folders_of_a_folder_are_its_splits(tmp_path, caplog):
    put(tmp_path, *(f"{split}/{i}.png" for split in ("train", "valid", "test") for i in range(3)))
    data = unlabelled(tmp_path)
    for split, folder in (("train", "train"), ("val", "valid"), ("test", "test")):
        assert below(data, split, tmp_path) == [f"{folder}/{i}.png" for i in range(3)]
    assert "Ignored" not in caplog.text


def test_images_beside_split_folders_are_mentioned(tmp_path, caplog):
    put(tmp_path, "train/cat/1.png", "train/2.png", "test/cat/1.png", "loose.png", "other/1.png", "other/2.png")
    data = unlabelled(tmp_path)
    assert below(data, "train", tmp_path) == ["train/2.png", "train/cat/1.png"]
    assert f"Ignored 3 images in {tmp_path} that are not in test or train." in caplog.text


def test_class_folders_give_the_images_of_the_labelled_data(tmp_path):
    put(tmp_path, *(f"{split}/{label}/{i}.png" for split in ("train", "val") for label in ("a", "b") for i in range(3)))
    same(unlabelled(tmp_path), open_data(tmp_path))


def test_few_unreadable_files_are_left_out(tmp_path):
    put(tmp_path, *(f"train/{i:03}.png" for i in range(3)), *(f"val/{i:03}.png" for i in range(200)))
    (tmp_path / "train/000.png").write_bytes(b"")
    data = unlabelled(tmp_path)
    assert below(data, "train", tmp_path) == ["train/001.png", "train/002.png"]
    assert data.unreadable == ((str(tmp_path / "train/000.png"), "empty file"),)
    for i in (1, 2):
        (tmp_path / f"train/00{i}.png").unlink()
    with pytest.raises(UserError, match=r"The train split of .* has no images"):
        unlabelled(tmp_path)


def test_a_folder_without_images_is_refused_in_terms_of_images(tmp_path):
    with pytest.raises(UserError, match=r"has no images \(.*\.png.*or give the folder that has them") as error:
        unlabelled(tmp_path)
    assert "class" not in str(error.value)
    put(tmp_path, "train/1.png", "train/2.png")
    (tmp_path / "val").mkdir()
    with pytest.raises(UserError, match=r"val has no images"):
        unlabelled(tmp_path)
    put(tmp_path, "val/1.png")
    for i in range(3):
        (tmp_path / f"train/bad{i}.png").write_bytes(b"words")
    with pytest.raises(UserError, match=r"3 of 6 images .* cannot be read"):
        unlabelled(tmp_path)


# Tables


def table(path: Path, *rows: tuple[str, ...]) -> Path:
    if path.suffix == ".parquet":
        columns = {name: list(cells) for name, *cells in zip(*rows, strict=True)}
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
    else:
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",").writerows(rows)
    return path


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet"])
def test_a_table_needs_only_the_column_of_images(tmp_path, suffix):
    files = [f"{i}.png" for i in range(6)]
    put(tmp_path, *files)
    data = unlabelled(table(tmp_path / f"one{suffix}", ("file",), *((file,) for file in files)), val_fraction=0.3)
    assert greys(data.splits["train"], data.splits["val"]) == list(range(6))
    assert len(data.splits["val"]) == 2
    words = ["train", "train", "val", "val", "test", "test"]
    splits = table(tmp_path / f"splits{suffix}", ("file", "split"), *zip(files, words, strict=True))
    assert [greys(split) for split in unlabelled(splits).splits.values()] == [[0, 1], [2, 3], [4, 5]]


def test_the_labels_of_a_table_are_ignored(tmp_path, caplog):
    files = [f"{i}.png" for i in range(4)]
    put(tmp_path, *files)
    header = ("path", "colour", "age", "split")
    rows = [(file, "", "many", "val" if i > 2 else "train") for i, file in enumerate(files)]
    again = [("1.png", "red", "", "train"), ("1.png", "blue", "3", "train")]
    with caplog.at_level("INFO", "vitrail"):
        data = unlabelled(table(tmp_path / "some.csv", header, *rows, *again))
    assert [Path(name).name for name in names(data.splits["train"])] == files[:3]
    assert "images are in the column 'path'.\n" in caplog.text
    assert "skipping 2 duplicate rows" in caplog.text


def test_a_table_gives_the_images_of_the_labelled_data(tmp_path):
    files = [f"{i}.png" for i in range(4)]
    put(tmp_path, *files)
    rows = zip(files, ["a", "b"] * 2, ["train", "train", "val", "val"], strict=True)
    path = table(tmp_path / "some.csv", ("image", "label", "split"), *rows)
    same(unlabelled(path), open_data(path))


def test_what_is_wrong_with_a_table_is_said_without_a_word_on_labels(tmp_path):
    put(tmp_path, "1.png", "2.png")

    def complains(about: str, *rows: tuple[str, ...], **settings: object) -> None:
        with pytest.raises(UserError, match=about) as error:
            unlabelled(table(tmp_path / "some.csv", *rows), **settings)
        assert "--label-column" not in str(error.value)

    complains("which of the columns a, b has the paths", ("a", "b"), ("1", "2"))
    complains("row 3 has no image", ("image", "label"), ("1.png", "a"), ("", "b"))
    complains("is in two splits", ("image", "split"), ("1.png", "train"), ("1.png", "val"))
    complains("has no column 'photo'", ("image",), ("1.png",), image_column="photo")
    complains("has no rows", ("image",))


# Arrays


def pixels(n: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(n).integers(0, 256, (n, *(shape or (5, 4))), dtype=np.uint8)


LABELS = [
    {},
    {"y": np.arange(3)},  # of the wrong length
    {"y": np.array(["a", None], dtype=object)},  # never loaded
    {"y": np.full((10, 2), np.nan), "classes": np.array([1, 1])},
]


@pytest.mark.parametrize("x", ["x_train", "images", "X"])
@pytest.mark.parametrize("others", LABELS)
def test_only_the_images_of_an_npz_are_read(tmp_path, x, others):
    y = {"x_train": "y_train", "images": "labels", "X": "y"}[x]
    np.savez(tmp_path / "some.npz", **{x: pixels(10)}, **{y if name == "y" else name: a for name, a in others.items()})
    data = unlabelled(tmp_path / "some.npz", val_fraction=0.2)
    assert [len(split) for split in data.splits.values()] == [8, 2]
    together = np.concatenate([split.pixels[..., 0] for split in data.splits.values()])
    assert sorted(map(bytes, together)) == sorted(map(bytes, pixels(10)))


def test_the_splits_of_an_npz_are_those_of_the_labelled_data(tmp_path):
    y = {f"y_{split}": np.arange(n) % 2 for split, n in (("train", 6), ("val", 4), ("test", 2))}
    np.savez(tmp_path / "some.npz", x_train=pixels(6), x_val=pixels(4), x_test=pixels(2), **y)
    same(unlabelled(tmp_path / "some.npz"), open_data(tmp_path / "some.npz"))
    np.savez(tmp_path / "some.npz", x_train=pixels(6), x_val=pixels(4), y_test=pixels(2))
    assert list(unlabelled(tmp_path / "some.npz").splits) == ["train", "val"]


@pytest.mark.parametrize("y", [None, np.arange(10) % 2, np.arange(3), np.array([{}, {}], dtype=object)])
@pytest.mark.parametrize("x", ["x_train", "pictures"])
def test_a_file_of_images_is_opened_alone(tmp_path, x, y):
    np.save(tmp_path / f"{x}.npy", pixels(10))
    if y is not None:
        np.save(tmp_path / "y_train.npy", y, allow_pickle=True)
        np.save(tmp_path / "classes.npy", y, allow_pickle=True)
    data = unlabelled(tmp_path / f"{x}.npy", val_fraction=0.2)
    assert [len(split) for split in data.splits.values()] == [8, 2]
    assert isinstance(data.splits["train"], MappedSplit)
    for split in data.splits.values():
        rows = [int(name.rpartition("/")[2]) for name in names(split)]
        assert np.array_equal(split.take(np.arange(len(split)))[..., 0], pixels(10)[rows])


def test_a_folder_of_arrays_has_their_splits(tmp_path):
    for split, n in (("train", 6), ("valid", 4)):
        np.save(tmp_path / f"x_{split}.npy", pixels(n))
    data = unlabelled(tmp_path)
    for split, n in (("train", 6), ("valid", 4)):
        np.save(tmp_path / f"y_{split}.npy", np.arange(n) % 2)
    same(data, open_data(tmp_path))


def test_what_is_wrong_with_arrays_is_said_without_a_word_on_labels(tmp_path):
    np.savez(tmp_path / "some.npz", pictures=pixels(3), y=np.arange(3))
    with pytest.raises(UserError, match=r"must contain the array x_train .*, or X, but it contains pictures, y\."):
        unlabelled(tmp_path / "some.npz")
    np.savez(tmp_path / "some.npz", x=np.array(3))
    with pytest.raises(UserError, match=r"images must have the shape"):
        unlabelled(tmp_path / "some.npz")
    for i in range(2):
        np.save(tmp_path / f"image_{i}.npy", pixels(3))
    with pytest.raises(UserError, match=r"if each is a single image, move them to a subfolder"):
        unlabelled(tmp_path)


# Built-in data sets


def test_the_labels_of_a_built_in_set_are_dropped():
    data, labelled = unlabelled("digits"), open_data("digits")
    assert [len(split) for split in data.splits.values()] == [1438, 359]
    both = (np.concatenate([split.pixels for split in found.splits.values()]) for found in (data, labelled))
    one, other = (sorted(map(bytes, pixels)) for pixels in both)
    assert one == other


# What all sources share


def test_the_held_out_images_depend_on_the_seed_alone(tmp_path):
    put(tmp_path, *(f"{i:02}.png" for i in range(20)))
    held = [below(unlabelled(tmp_path, seed=seed), "val", tmp_path) for seed in (0, 0, 1)]
    assert [len(files) for files in held] == [4] * 3
    assert held[0] == held[1] != held[2]


@pytest.mark.parametrize(("images", "fraction", "sizes"), [(3, 0.01, [2, 1]), (3, 0.99, [2, 1]), (10, 0.99, [2, 8])])
def test_one_image_is_held_out_and_two_are_kept(tmp_path, images, fraction, sizes):
    put(tmp_path, *(f"{i}.png" for i in range(images)))
    assert [len(split) for split in unlabelled(tmp_path, val_fraction=fraction).splits.values()] == sizes


def test_too_few_images_are_refused(tmp_path):
    put(tmp_path, "1.png")
    with pytest.raises(UserError, match=r"has one image to learn from\. Pre-training needs two or more\."):
        unlabelled(tmp_path)
    put(tmp_path, "1.png", "2.png")
    with pytest.raises(UserError, match=r"has 2 images, too few to hold out a validation split\. Add images"):
        unlabelled(tmp_path)


def test_folds_are_cut_at_random(tmp_path):
    put(tmp_path, *(f"train/{i}.png" for i in range(7)), *(f"val/{i}.png" for i in range(3)), "test/1.png")
    held = []
    for fold in (1, 2, 3):
        data = unlabelled(tmp_path, folds=3, fold=fold)
        assert (len(data.splits["train"]) + len(data.splits["val"]), len(data.splits["test"])) == (10, 1)
        held += names(data.splits["val"])
    assert len(set(held)) == len(held) == 10
    with pytest.raises(UserError, match="10 images, too few for 11 folds"):
        unlabelled(tmp_path, folds=11, fold=1)


def test_a_label_column_is_refused_in_one_sentence(tmp_path):
    put(tmp_path, "1.png", "2.png", "3.png")
    path = table(tmp_path / "some.csv", ("image", "label"), *((f"{i}.png", "a") for i in (1, 2, 3)))
    rule = r"^--label-column does not apply to [\w-]+, which reads no labels: remove it\.$"
    for source in (path, tmp_path, "digits"):
        with pytest.raises(UserError, match=rule):
            unlabelled(source, label_column="label")


def test_a_trained_task_without_labels_opens_other_data(tmp_path):
    put(tmp_path, "cat/1.png", "dog/2.png")
    data = open_data(tmp_path, model=Unlabelled())
    assert (data.task, list(data.splits)) == (Unlabelled(), ["all"])
    assert data.splits["all"].targets.shape == (2, 0)


def test_the_task_that_is_inferred_is_contrasted_with_labelled_ones(tmp_path, caplog, monkeypatch):
    monkeypatch.setitem(tasks.TASKS, Unlabelled.name, Unlabelled)
    put(tmp_path, "1.png", "2.png", "3.png", "4.png")
    np.savez(tmp_path / "some.npz", x=pixels(8), y=np.arange(8) / 3)
    path = table(tmp_path / "some.csv", ("image", "label"), *((f"{i}.png", "ab"[i % 2]) for i in (1, 2, 3, 4)))
    with caplog.at_level("INFO", "vitrail"):
        open_data(path, val_fraction=0.5)
        open_data(tmp_path / "some.npz", val_fraction=0.5)
    assert "override it with --task multilabel, regression or pairs." in caplog.text
    assert "override it with --task multiclass, multilabel or pairs." in caplog.text


def test_the_fingerprint_is_that_of_the_number_of_images(tmp_path):
    put(tmp_path, *(f"{split}/{i}.png" for split in ("train", "val") for i in range(3)))
    one = unlabelled(tmp_path).fingerprint()
    assert unlabelled(tmp_path).fingerprint() == one
    put(tmp_path / "train", "4.png")
    assert unlabelled(tmp_path).fingerprint() != one


def test_the_fingerprint_of_labelled_data_is_as_it_was():
    assert open_data("digits").fingerprint() == "89284ef374a92e3188681872011fe24d7509e66252445f5ba9ec5faeeb07845f"


def test_the_data_of_a_run_is_opened_as_its_model_was_trained(trained, monkeypatch):
    monkeypatch.setitem(tasks.TASKS, Unlabelled.name, Unlabelled)
    run = Run(trained)
    data = run.data(replace(run.card, task=Unlabelled())).read_as(3, 8)
    assert (data.classes, data.splits["train"].targets.shape) == ((), (1438, 0))


@pytest.mark.parametrize("crop_scale", [1.0, 0.5])
def test_batches_and_caches_take_images_without_labels(tmp_path, crop_scale):
    np.savez(tmp_path / "some.npz", x=pixels(20))
    put(tmp_path / "files", *(f"{i:02}.png" for i in range(20)))
    for source in (tmp_path / "some.npz", tmp_path / "files", "digits"):
        data = unlabelled(source).read_as(3, 8)
        preprocess = Preprocess((8, 8), 3)
        cached = once(data.splits["train"], preprocess, crop_scale < 1, gigabytes=1)
        if source == tmp_path / "files":
            assert isinstance(cached, KeptSplit if crop_scale < 1 else ReadySplit)
        loader = TrainBatches(data.splits["train"], preprocess, 4, seed=0, crop_scale=crop_scale)
        epochs = [list(replace(loader, split=split).epoch(1)) for split in (loader.split, cached)]
        assert len(epochs[0]) == len(loader)
        for (images, targets), (again, _) in zip(*epochs, strict=True):
            assert images.shape == (4, 3, 8, 8)
            assert targets.shape == (4, 0)
            assert images.equal(again)
        assert all(targets.shape[1] == 0 for _, targets in batches(data.splits["val"], preprocess, 3))
