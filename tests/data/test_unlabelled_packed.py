"""Tar shards and Hugging Face data sets open without labels, whether they have some or not."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import datasets
import pytest
from unlabelled import greys, png, same, unlabelled

from vitrail.data import open_data
from vitrail.data.stream import StreamSplit
from vitrail.errors import UserError


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path_factory):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    datasets.disable_progress_bars()


# Tar shards


def tar(path: Path, files: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def test_the_images_of_shards_need_no_labels(tmp_path):
    tar(tmp_path / "train-0.tar", {f"{i}.png": png(i) for i in range(5)})
    others = {"5.cls": b"cat", "6.json": b"{", "7.txt": b"\xff" * 2000, "9.cls": b"no image"}
    tar(tmp_path / "train-1.tar", {f"{i}.png": png(i) for i in range(5, 9)} | others)
    tar(tmp_path / "val-0.tar", {"9.png": png(9)})
    (tmp_path / "classes.json").write_text("{")
    data = unlabelled(tmp_path)
    assert [greys(split) for split in data.splits.values()] == [list(range(9)), [9]]
    assert data.unreadable == ()


def test_labelled_shards_give_the_same_images_and_keep_their_own_index(tmp_path):
    labelled = {f"{i}.png": png(i) for i in range(8)} | {f"{i}.cls": str(i % 2).encode() for i in range(8)}
    for split in ("train", "val"):
        tar(tmp_path / f"{split}.tar", labelled)
    for _ in range(2):  # the second time from the cached index
        data = open_data(tmp_path)
        assert data.splits["train"].targets.tolist() == [0, 1] * 4
        same(unlabelled(tmp_path), data)


def test_shards_without_images_are_refused_in_terms_of_images(tmp_path):
    tar(tmp_path / "a.tar", {"1.cls": b"cat", "2.json": json.dumps({"label": 1}).encode()})
    with pytest.raises(UserError, match=r"no samples\. A shard is a tar file of images: 17\.jpg, 18\.jpg\."):
        unlabelled(tmp_path)


# Hugging Face data sets


def rows(first: int, count: int, **columns: list[object]) -> datasets.Dataset:
    images = [{"bytes": png(i), "path": None} for i in range(first, first + count)]
    made = datasets.Dataset.from_dict({"image": images}, features=datasets.Features({"image": datasets.Image()}))
    for name, column in columns.items():
        made = made.add_column(name, column)
    return made


COLUMNS = [
    lambda _: {},
    lambda n: {"label": [i % 2 for i in range(n)]},
    lambda n: {"label": [None] * n, "other": [0.5] * n},
    lambda n: {"fine": [[1, 2]] * n, "coarse": ["a"] * n},
]


@pytest.mark.parametrize("columns", COLUMNS)
def test_saved_data_sets_need_only_their_images(tmp_path, columns):
    parts = {
        "train": rows(0, 8, **columns(8)),
        "validation": rows(20, 4, **columns(4)),
        "test": rows(30, 2, **columns(2)),
    }
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "splits")
    data = unlabelled(tmp_path / "splits")
    assert [greys(split) for split in data.splits.values()] == [[*range(8)], [*range(20, 24)], [30, 31]]
    parts["train"].save_to_disk(tmp_path / "one")
    data = unlabelled(tmp_path / "one", val_fraction=0.25)
    assert [len(split) for split in data.splits.values()] == [6, 2]
    assert greys(*data.splits.values()) == list(range(8))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("columns", COLUMNS)
def test_parquet_files_with_images_need_only_those(tmp_path, columns, streaming):
    for i in range(3):
        put_parquet(tmp_path / "set" / f"train-0000{i}-of-00003.parquet", rows(10 * i, 10, **columns(10)))
    data = unlabelled(tmp_path / "set", val_fraction=0.2, streaming=streaming)
    assert [len(split) for split in data.splits.values()] == [24, 6]
    assert greys(*data.splits.values()) == list(range(30))
    put_parquet(tmp_path / "set" / "test-00000-of-00001.parquet", rows(100, 6, **columns(6)))
    data = unlabelled(tmp_path / "set", streaming=streaming)
    assert isinstance(data.splits["train"], StreamSplit) == streaming
    train = [int(data.splits["train"].image(i)[0, 0, 0]) for i in (0, 9, 10, 29)]
    assert (train, greys(data.splits["test"])) == ([0, 9, 10, 29], list(range(100, 106)))


def put_parquet(path: Path, made: datasets.Dataset) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    made.to_parquet(path)


def test_arrow_files_are_streamed_without_labels(tmp_path):
    rows(0, 10, label=[None] * 10).save_to_disk(tmp_path / "saved")
    (tmp_path / "set").mkdir()
    (tmp_path / "saved" / "data-00000-of-00001.arrow").rename(tmp_path / "set" / "train.arrow")
    for streaming in (True, False):
        data = unlabelled(tmp_path / "set", val_fraction=0.2, streaming=streaming)
        assert greys(*data.splits.values()) == list(range(10))


def test_a_labelled_data_set_gives_the_same_images(tmp_path):
    datasets.DatasetDict(train=rows(0, 8, label=[0, 1] * 4), test=rows(20, 4, label=[0, 1] * 2)).save_to_disk(tmp_path)
    same(unlabelled(tmp_path), open_data(tmp_path))


def test_the_image_column_is_asked_for_or_given(tmp_path):
    made = rows(0, 8).rename_column("image", "left").add_column("note", ["a"] * 8)
    right = rows(10, 8).rename_column("image", "right")
    datasets.concatenate_datasets([made, right], axis=1).save_to_disk(tmp_path)
    with pytest.raises(UserError, match=r"left, note, right contains the images\? Set --image-column"):
        unlabelled(tmp_path)
    assert greys(*unlabelled(tmp_path, image_column="right").splits.values()) == list(range(10, 18))
