"""Hugging Face data sets are read where `datasets` saved them, from Parquet files, and as streams."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import vitrail
from vitrail.data import UnreadableImage, open_data
from vitrail.data import stream as stream_module
from vitrail.data.audit import audit
from vitrail.data.huggingface import _Shards
from vitrail.data.loader import TrainBatches, batches
from vitrail.data.packed import PackedSplit
from vitrail.data.preprocess import Preprocess
from vitrail.data.stream import StreamSplit
from vitrail.errors import UserError

pytestmark = pytest.mark.usefixtures("plain_runs")

NAMED = datasets.ClassLabel(names=["cat", "dog"])


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def png(value: int, mode: str = "L") -> bytes:
    stream = io.BytesIO()
    Image.new(mode, (6, 4), value).save(stream, "PNG")
    return stream.getvalue()


def rows(first: int, count: int, kind: object = NAMED, **columns: object) -> datasets.Dataset:
    """Images whose grey value is their number, and whose class is whether it is odd."""
    numbers = range(first, first + count)
    labels = [("cat", "dog")[i % 2] if kind == datasets.Value("string") else i % 2 for i in numbers]
    images = [{"bytes": png(i), "path": None} for i in numbers]
    features = datasets.Features({"image": datasets.Image(), "label": kind})
    made = datasets.Dataset.from_dict({"image": images, "label": labels}, features=features)
    for name, column in columns.items():
        made = made.add_column(name, column)
    return made


def pairs(split) -> list[tuple[int, int]]:
    """Grey value and class of every image."""
    return [(int(split.image(i)[0, 0, 0]), int(split.targets[i])) for i in range(len(split))]


def odd(*numbers: int) -> list[tuple[int, int]]:
    return [(i, i % 2) for i in range(*numbers)]


# What is saved


@pytest.mark.parametrize("kind", [NAMED, datasets.Value("string"), datasets.Value("int32")])
def test_a_saved_data_set_without_splits_is_split_class_by_class(tmp_path, kind):
    rows(0, 20, kind).save_to_disk(tmp_path / "pets")
    data = open_data(tmp_path / "pets", val_fraction=0.2)
    names = ("0", "1") if kind == datasets.Value("int32") else ("cat", "dog")
    assert (data.name, data.classes, data.size, data.channels) == ("pets", names, (4, 6), 1)
    assert isinstance(data.splits["train"], PackedSplit)
    assert {split: len(found) for split, found in data.splits.items()} == {"train": 16, "val": 4}
    assert sorted(pairs(data.splits["train"]) + pairs(data.splits["val"])) == odd(20)


def test_the_splits_of_a_saved_data_set_are_ours(tmp_path):
    parts = {"train": rows(0, 8), "validation": rows(20, 4), "test": rows(30, 6), "extra": rows(50, 2)}
    datasets.DatasetDict(parts).save_to_disk(tmp_path)
    data = open_data(tmp_path)
    assert {split: pairs(found) for split, found in data.splits.items()} == {
        "train": odd(8),
        "val": odd(20, 24),
        "test": odd(30, 36),
    }
    assert data.splits["test"].name(2) == f"{tmp_path.name}/test/2"


def test_rows_that_were_chosen_or_shuffled_keep_their_labels(tmp_path):
    rows(0, 20).shuffle(seed=3).select(range(5, 15)).save_to_disk(tmp_path)
    data = open_data(tmp_path, val_fraction=0.2)
    found = pairs(data.splits["train"]) + pairs(data.splits["val"])
    assert len(found) == 10
    assert all(label == value % 2 for value, label in found)


def test_a_test_split_with_secret_labels_is_left_out(tmp_path, caplog):
    secret = rows(30, 4).map(lambda _: {"label": -1})
    datasets.DatasetDict(train=rows(0, 8), validation=rows(20, 4), test=secret).save_to_disk(tmp_path)
    with caplog.at_level("INFO", "vitrail"):
        assert list(open_data(tmp_path).splits) == ["train", "val"]
    assert "the test split, which has no labels" in caplog.text


def test_images_that_lie_in_files_are_found_there(tmp_path):
    for i in range(8):
        (tmp_path / f"{i}.png").write_bytes(png(i))
    cells = [{"bytes": None, "path": str(tmp_path / f"{i}.png")} for i in range(8)]
    kind = pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})
    table = pyarrow.table({"image": pyarrow.array(cells, kind), "label": [0, 1] * 4})
    pyarrow.parquet.write_table(table, tmp_path / "set.parquet")
    data = open_data(tmp_path / "set.parquet", val_fraction=0.5)
    assert sorted(pairs(data.splits["train"]) + pairs(data.splits["val"])) == odd(8)
    (tmp_path / "3.png").unlink()
    with pytest.raises(UserError, match=r"set/train/3 \(no such file or directory\)"):
        open_data(tmp_path / "set.parquet")


def test_unreadable_images_are_left_out_by_name_or_refused(tmp_path):
    images = [png(i % 200) for i in range(201)]
    images[7] = images[7][:50]
    made = datasets.Dataset.from_dict({"image": images, "label": [i % 2 for i in range(201)]})
    made.cast_column("image", datasets.Image()).save_to_disk(tmp_path / "many")
    data = open_data(tmp_path / "many")
    assert [name for name, _ in data.unreadable] == ["many/train/7"]
    assert len(data.splits["train"]) + len(data.splits["val"]) == 200
    made.select(range(20)).cast_column("image", datasets.Image()).save_to_disk(tmp_path / "few")
    with pytest.raises(UserError, match=r"1 of 20 images .*few/train/7"):
        open_data(tmp_path / "few")


# Columns


def test_columns_are_found_by_their_kinds_or_given(tmp_path):
    made = rows(0, 8, id=list(range(8)), note=["a", "b"] * 4).rename_columns({"image": "photo", "label": "species"})
    made.save_to_disk(tmp_path)
    assert open_data(tmp_path).classes == ("cat", "dog")
    assert open_data(tmp_path, label_column="note").classes == ("a", "b")
    with pytest.raises(UserError, match=r"no column 'notes'\. Did you mean 'note'"):
        open_data(tmp_path, label_column="notes")


def test_columns_that_could_be_either_are_asked_for(tmp_path):
    made = rows(0, 8).rename_column("label", "fine")
    made = made.add_column("coarse", [0] * 8, feature=datasets.ClassLabel(names=["animal"]))
    made.save_to_disk(tmp_path / "two")
    with pytest.raises(UserError, match=r"image, fine, coarse contains the labels\? Set --label-column"):
        open_data(tmp_path / "two")
    assert open_data(tmp_path / "two", label_column="fine").classes == ("cat", "dog")
    rows(0, 8).rename_column("image", "a").remove_columns("a").save_to_disk(tmp_path / "none")
    with pytest.raises(UserError, match=r"contains the images\? Set --image-column"):
        open_data(tmp_path / "none")


def test_labels_may_be_numbers_but_not_lists_of_unnamed_ones(tmp_path):
    for name, labels in {"lists": [[], [1], [0, 1], [1]], "numbers": [0.0, 1.5, 0.5, 1.5]}.items():
        made = datasets.Dataset.from_dict({"image": [png(i) for i in range(4)], "label": labels})
        made.cast_column("image", datasets.Image()).save_to_disk(tmp_path / name)
    with pytest.raises(UserError, match="lists of numbers must have one length, but they have 0 to 2"):
        open_data(tmp_path / "lists", label_column="label")
    assert open_data(tmp_path / "numbers", label_column="label").task.name == "regression"


def test_a_label_that_is_missing_is_named_by_its_row(tmp_path):
    made = datasets.Dataset.from_dict({"image": [png(i) for i in range(4)], "label": ["a", "b", None, "b"]})
    made.cast_column("image", datasets.Image()).save_to_disk(tmp_path)
    with pytest.raises(UserError, match="row 2 of the train split has no label"):
        open_data(tmp_path)


# Parquet


def put_parquet(folder: Path, shards: int = 3, each: int = 10) -> Path:
    folder.mkdir(parents=True)
    for i in range(shards):
        rows(each * i, each).to_parquet(folder / f"train-{i:05}-of-{shards:05}.parquet")
    rows(100, 6).to_parquet(folder / "test-00000-of-00001.parquet")
    return folder


@pytest.mark.parametrize("inside", [".", "data"])
def test_a_folder_of_parquet_files_is_read_as_the_hub_would(tmp_path, inside):
    put_parquet(tmp_path / "set" / inside)
    data = open_data(tmp_path / "set")
    assert (data.name, data.classes) == ("set", ("cat", "dog"))
    assert pairs(data.splits["train"]) == odd(30)
    assert pairs(data.splits["test"]) == odd(100, 106)


def test_a_parquet_file_with_the_images_in_it_is_no_table_of_paths(tmp_path):
    rows(0, 8).to_parquet(tmp_path / "pets.parquet")
    data = open_data(tmp_path / "pets.parquet", val_fraction=0.5)
    assert data.name == "pets"
    assert sorted(pairs(data.splits["train"]) + pairs(data.splits["val"])) == odd(8)


# Streaming


def test_a_stream_brings_what_the_files_hold(tmp_path):
    data = open_data(put_parquet(tmp_path / "set"), streaming=True)
    assert (data.name, data.classes, data.size, data.channels) == ("set", ("cat", "dog"), (4, 6), 1)
    assert isinstance(data.splits["train"], StreamSplit)
    assert pairs(data.splits["train"]) == odd(30)
    found = list(batches(data.splits["val"], Preprocess((4, 6), 1), 4))
    assert [len(labels) for _, labels in found] == [4, 2]
    assert np.concatenate([images[:, 0, 0, 0] for images, _ in found]).tolist() == list(range(100, 106))
    assert np.concatenate([labels for _, labels in found]).tolist() == [0, 1] * 3


def test_arrow_files_are_streamed_too(tmp_path):
    for name, made in {"train": rows(0, 20), "test": rows(40, 4)}.items():
        made.save_to_disk(tmp_path / "saved")
        (tmp_path / "set").mkdir(exist_ok=True)
        (tmp_path / "saved" / "data-00000-of-00001.arrow").rename(tmp_path / "set" / f"{name}.arrow")
    for streaming in (True, False):
        data = open_data(tmp_path / "set", streaming=streaming)
        assert (pairs(data.splits["train"]), pairs(data.splits["test"])) == (odd(20), odd(40, 44))


def test_a_stream_does_not_bring_an_image_twice(tmp_path):
    split = open_data(put_parquet(tmp_path / "set"), streaming=True).splits["train"]
    with pytest.raises(UserError, match="some are needed twice"):
        list(batches(split, Preprocess((4, 6), 1), 4, indices=[1, 2, 1]))


def test_what_a_stream_has_no_split_for_is_held_out(tmp_path):
    put_parquet(tmp_path / "set")
    (tmp_path / "set" / "test-00000-of-00001.parquet").unlink()
    data = open_data(tmp_path / "set", val_fraction=0.2, streaming=True)
    train, val = pairs(data.splits["train"]), pairs(data.splits["val"])
    assert (len(train), len(val)) == (24, 6)
    assert sorted(train + val) == odd(30)


def test_the_order_of_a_stream_is_drawn_by_the_seed_and_the_epoch_within_the_buffer(tmp_path, monkeypatch):
    monkeypatch.setattr(stream_module, "BUFFER", 4)
    split = open_data(put_parquet(tmp_path / "set"), streaming=True).splits["train"]

    def epoch(seed: int, number: int) -> list[int]:
        loader = TrainBatches(split, Preprocess((4, 6), 1), 5, seed=seed)
        found = [(images[:, 0, 0, 0].tolist(), labels.tolist()) for images, labels in loader.epoch(number)]
        for values, labels in found:
            assert labels == [value % 2 for value in values]
        return [value for values, _ in found for value in values]

    orders = [epoch(0, 0), epoch(0, 1), epoch(1, 0)]
    assert all(sorted(order) == list(range(30)) for order in orders)
    assert len(set(map(tuple, orders))) == 3
    assert epoch(0, 1) == orders[1]
    for order in orders:  # shards come whole, but for the edges between them
        shards = [value // 10 for value in order]
        assert all(shards.count(s) == 10 for s in range(3))
        assert sum(a != b for a, b in pairwise(shards)) <= 12
    held = split.reader(split.order(np.random.default_rng(0)))
    for i in split.order(np.random.default_rng(0)).tolist():
        held.image(i)
        assert len(held._buffer) <= 4


def test_a_stream_resumes_with_the_same_batches_and_does_not_read_what_is_past(tmp_path, monkeypatch):
    monkeypatch.setattr(stream_module, "BUFFER", 4)
    split = open_data(put_parquet(tmp_path / "set"), streaming=True).splits["train"]
    loader = TrainBatches(split, Preprocess((3, 3), 1), 5, seed=7, crop_scale=0.5)
    whole = [(images.tolist(), labels.tolist()) for images, labels in loader.epoch(3)]
    for start in range(7):
        again = [(images.tolist(), labels.tolist()) for images, labels in loader.epoch(3, start)]
        assert again == whole[start:]
    opened = []
    read = type(split.stream).read
    monkeypatch.setattr(type(split.stream), "read", lambda self, shard: opened.append(shard) or read(self, shard))
    list(loader.epoch(3, 5))
    assert len(opened) == 1  # of three shards


def test_a_streamed_run_that_is_resumed_ends_as_if_it_had_not_stopped(tmp_path, small, monkeypatch):
    monkeypatch.setattr(stream_module, "BUFFER", 4)
    source = put_parquet(tmp_path / "set")
    settings = small | {"streaming": True, "batch_size": 5, "epochs": 2, "out": tmp_path, "save_minutes": 0.0}
    straight = vitrail.train(source, name="straight", **settings)
    opened, read = [], _Shards.read

    def stop(self: _Shards, shard: int) -> Iterator[bytes]:
        opened.append(shard)
        if len(opened) == 8:  # one to look at it, three and one to validate in the first epoch, the third in the second
            raise KeyboardInterrupt
        return read(self, shard)

    monkeypatch.setattr(_Shards, "read", stop)
    with pytest.raises(KeyboardInterrupt):
        vitrail.train(source, name="stopped", **settings)
    monkeypatch.setattr(_Shards, "read", read)
    stopped = vitrail.train(resume=tmp_path / "stopped")
    for run in (straight, stopped):
        assert len((run / "metrics.csv").read_text().splitlines()) == 3
    name = "model.safetensors"
    assert load_file(stopped / name).keys() == load_file(straight / name).keys()
    for key, tensor in load_file(straight / name).items():
        assert torch.equal(load_file(stopped / name)[key], tensor)
    assert vitrail.evaluate(stopped).confusion.sum() == 6


def test_an_unreadable_image_stops_a_stream_with_its_name(tmp_path):
    made = datasets.Dataset.from_dict({"image": [png(i) for i in range(80)] + [b"words"], "label": [0, 1] * 40 + [0]})
    (tmp_path / "set").mkdir()
    made.cast_column("image", datasets.Image()).to_parquet(tmp_path / "set" / "train.parquet")
    data = open_data(tmp_path / "set", streaming=True)
    bad = next(split for split in data.splits.values() if 80 in split.rows)
    with pytest.raises(UserError, match=r"set/train/80 cannot be read: not an image.*Drop --streaming"):
        list(batches(bad, Preprocess((4, 6), 1), 8))


def test_a_stream_whose_files_went_away_says_so(tmp_path):
    data = open_data(put_parquet(tmp_path / "set"), streaming=True)
    (tmp_path / "set" / "train-00001-of-00003.parquet").unlink()
    with pytest.raises(UserError, match=r"the stream was interrupted.*Continue with --resume"):
        list(batches(data.splits["train"], Preprocess((4, 6), 1), 8))


@pytest.mark.parametrize("source", ["digits", "saved"])
def test_what_cannot_be_streamed_is_refused(tmp_path, source):
    rows(0, 8).save_to_disk(tmp_path / "saved")
    with pytest.raises(UserError, match=r"is neither\. Remove --streaming"):
        open_data(source if source == "digits" else tmp_path / "saved", streaming=True)


# With the verbs, and without the package or the network


def test_a_saved_data_set_is_checked_image_by_image(tmp_path):
    datasets.DatasetDict(train=rows(0, 8), validation=rows(4, 4)).save_to_disk(tmp_path)
    found = audit(tmp_path)
    assert found.images == 12
    assert sum(finding.kind == "leak" for finding in found.findings) >= 4
    assert found.items[3].read()[0, 0, 0] == 3


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    rows(0, 8).save_to_disk(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    for source in (tmp_path, "hf:mnist"):
        with pytest.raises(UserError, match=r"pip install 'vitrail\[data\]'"):
            open_data(source)


def test_without_a_network_the_way_out_is_said(tmp_path):
    code = "import vitrail.data as d\ntry: d.open_data('hf:nobody/nothing:en')\nexcept Exception as e: print(repr(e))"
    offline = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    found = subprocess.run([sys.executable, "-c", code], env=offline, capture_output=True, text=True, check=True)
    assert found.stdout.startswith("UserError(")
    assert "hf:nobody/nothing:en is not in the cache" in found.stdout
    assert "Retrying" not in found.stderr  # for half a minute, as `datasets` would
    assert "save_to_disk" in found.stdout


def test_a_hub_name_stays_as_it_is_and_must_not_be_empty():
    assert vitrail.data.full_name("hf:ylecun/mnist") == "hf:ylecun/mnist"
    with pytest.raises(UserError, match="has no data set name"):
        open_data("hf:")


def test_a_folder_that_is_broken_is_a_user_error(tmp_path):
    rows(0, 8).save_to_disk(tmp_path)
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(UserError, match="cannot be opened by `datasets`"):
        open_data(tmp_path)


def test_a_row_without_an_image_is_unreadable(tmp_path):
    cells = [{"bytes": png(0), "path": None}, None, {"bytes": None, "path": None}, {"bytes": None, "path": "a\0b"}]
    kind = pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})
    for order in (cells, cells[1:]):  # also without an image in the first row
        table = pyarrow.table({"image": pyarrow.array(order, kind), "label": [0, 1, 0, 1][: len(order)]})
        pyarrow.parquet.write_table(table, tmp_path / "set.parquet")
        with pytest.raises(UserError, match=r"train/\d, \S+ \(empty file\); \S+ \(embedded null"):
            open_data(tmp_path / "set.parquet")
    with pytest.raises(UnreadableImage):
        vitrail.data.read_image(b"")
