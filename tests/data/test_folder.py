"""Folders open as one `Data`, and every mistake in them has its sentence."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from privileges import unprivileged

from vitrail.data import Data, FileSplit, open_data
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
    assert caplog.text.count("/dog/bad") == 10
    assert caplog.text.rstrip().endswith("and 2 more (empty file).")


def test_more_than_one_percent_unreadable_stops(tmp_path):
    put_many(tmp_path, cat=50, dog=49)
    for i in range(4):
        (tmp_path / "dog" / f"bad{i}.png").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"4 of 103 images \(3\.9%\)") as error:
        open_data(tmp_path)
    assert str(error.value).count("/dog/bad") == 4
    assert str(error.value).endswith("(not an image). Repair or remove them.")


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
    with pytest.raises(UserError, match="cannot be read: Permission denied"):
        unprivileged(open_data, tmp_path)


def test_the_classes_of_a_model_fix_the_order(tmp_path):
    put_many(tmp_path / "train", cat=2, dog=1)
    put_many(tmp_path / "val", dog=1)
    data = open_data(tmp_path, model=Multiclass(("dog", "elk", "cat")))
    assert data.classes == ("dog", "elk", "cat")
    assert data.splits["train"].targets.tolist() == [2, 2, 0]
    assert data.splits["train"].targets.dtype == np.int64
    with pytest.raises(UserError, match=r"a class 'dog' that the model does not know\. Did you mean 'dogs'\?"):
        open_data(tmp_path, model=Multiclass(("cat", "dogs")))
