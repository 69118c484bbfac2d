"""Tar shards in WebDataset form open as one `Data`, by brace, glob and folder, and their faults have sentences."""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vitrail
from vitrail.data import images as images_module
from vitrail.data import open_data
from vitrail.data.audit import audit
from vitrail.data.download import cache_folder
from vitrail.data.loader import TrainBatches
from vitrail.data.preprocess import Preprocess
from vitrail.data.shards import index
from vitrail.errors import UserError

pytestmark = pytest.mark.usefixtures("plain_runs")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path_factory.mktemp("cache")))


def png(value: int, mode: str = "L") -> bytes:
    stream = io.BytesIO()
    Image.new(mode, (6, 4), value).save(stream, "PNG")
    return stream.getvalue()


def write(path: Path, files: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def samples(first: int, count: int = 10, names: tuple[str, ...] = ("0", "1")) -> dict[str, bytes]:
    """Images whose grey value is their number, and whose class is whether it is odd."""
    files = {}
    for i in range(first, first + count):
        files |= {f"{i:04}.png": png(i), f"{i:04}.cls": names[i % 2].encode()}
    return files


def pairs(split) -> list[tuple[int, int]]:
    """Grey value and class of every image."""
    return [(int(split.image(i)[0, 0, 0]), int(split.targets[i])) for i in range(len(split))]


# Which files


@pytest.mark.parametrize("pattern", ["{00..02}.tar", "*.tar", "0?.tar", "{00,01,02}.tar", "{0{0..1},02}.tar", ""])
def test_shards_are_named_by_ranges_lists_globs_and_folders(tmp_path, pattern):
    for i in range(3):
        write(tmp_path / "set" / f"{i:02}.tar", samples(10 * i))
    data = open_data(str(tmp_path / "set" / pattern), val_fraction=0.5)
    assert (data.name, data.classes, data.size, data.channels) == ("set", ("0", "1"), (4, 6), 1)
    found = sorted(pairs(data.splits["train"]) + pairs(data.splits["val"]))
    assert found == [(i, i % 2) for i in range(30)]


def test_one_shard_is_named_by_its_file(tmp_path):
    path = write(tmp_path / "flowers.tar", samples(0))
    assert open_data(path).name == "flowers"
    assert open_data(path).splits["train"].name(0) == f"{path}/0000.png"


@pytest.mark.parametrize("form", ["train-000.tar val-000.tar test-000.tar", "train/0.tar validation/0.tar test/0.tar"])
def test_splits_are_told_by_names_or_folders(tmp_path, form):
    for i, name in enumerate(form.split()):
        write(tmp_path / name, samples(10 * i))
    data = open_data(tmp_path)
    assert list(data.splits) == ["train", "val", "test"]
    assert [pairs(split)[0][0] for split in data.splits.values()] == [0, 10, 20]


def test_class_folders_with_an_archive_beside_them_stay_class_folders(tmp_path):
    write(tmp_path / "backup.tar", samples(0))
    for name in "ab":
        (tmp_path / name).mkdir()
        for i in range(2):
            (tmp_path / name / f"{i}.png").write_bytes(png(i))
    assert open_data(tmp_path).classes == ("a", "b")


def test_a_shard_that_is_not_there_is_named(tmp_path):
    write(tmp_path / "00.tar", samples(0))
    with pytest.raises(UserError, match=r"there is no shard .*01\.tar"):
        open_data(str(tmp_path / "{00..03}.tar"))
    with pytest.raises(UserError, match=r"there is no shard .*02\.tar"):
        open_data(str(tmp_path / "02.tar"))


def test_a_compressed_shard_is_refused(tmp_path):
    (tmp_path / "00.tar.gz").write_bytes(b"anything")
    with pytest.raises(UserError, match=r"00\.tar\.gz is compressed"):
        open_data(tmp_path)


# What is in them


def test_labels_come_from_cls_json_or_txt_as_numbers_or_text(tmp_path):
    for end, label in (
        ("cls", b"dog\n"),
        ("txt", b" dog "),
        ("json", b'{"label": "dog", "id": 3}'),
    ):
        other = label.replace(b"dog", b"cat")
        path = write(tmp_path / f"{end}.tar", {f"{i}.png": png(i) for i in range(4)} | {
            f"{i}.{end}": (label, other)[i % 2] for i in range(4)
        })  # fmt: skip
        data = open_data(path, val_fraction=0.5)
        assert data.classes == ("cat", "dog")
        assert sorted(pairs(data.splits["train"]) + pairs(data.splits["val"])) == [(0, 1), (1, 0), (2, 1), (3, 0)]


def test_numbers_are_ordered_as_numbers(tmp_path):
    files = {f"{i}.png": png(i) for i in range(22)} | {f"{i}.cls": str(i // 2).encode() for i in range(22)}
    assert open_data(write(tmp_path / "a.tar", files)).classes == tuple(str(i) for i in range(11))


def test_another_field_of_the_json_is_named_as_the_label_column(tmp_path):
    files = {f"{i}.png": png(i) for i in range(4)} | {
        f"{i}.json": json.dumps({"label": "x", "kind": i % 2}).encode() for i in range(4)
    }
    path = write(tmp_path / "a.tar", files)
    assert open_data(path, label_column="kind").classes == ("0", "1")
    with pytest.raises(UserError, match=r"its \.json has no field 'sort'"):
        open_data(path, label_column="sort")


@pytest.mark.parametrize("name", ["classes.txt", "classes.json", "../classes.json"])
def test_classes_are_named_by_a_file_beside_the_shards(tmp_path, name):
    write(tmp_path / "train" / "a.tar", samples(0))
    content = "cat\ndog\n" if name.endswith("txt") else '{"0": "cat", "1": "dog"}'
    (tmp_path / "train" / name).write_text(content)
    assert open_data(tmp_path).classes == ("cat", "dog")
    (tmp_path / "train" / name).write_text("cat" if name.endswith("txt") else '["cat"]')
    with pytest.raises(UserError, match="a label is 1, but there are only 1 class names"):
        open_data(tmp_path)
    (tmp_path / "train" / name).write_bytes(b"\xff{")
    with pytest.raises(UserError, match="is not a file of class names"):
        open_data(tmp_path)


def test_names_with_folders_parts_and_many_letters_are_read(tmp_path):
    long = "x" * 150
    files = {}
    for i in range(4):
        files |= {f"./a/{long}{i}.png": png(i), f"./a/{long}{i}.cls": b"01"[i % 2 : i % 2 + 1]}
        files |= {f"./a/{long}{i}.seg.png": png(200), "./__meta__": b"", f"./.{i}.png": b"hidden"}
    data = open_data(write(tmp_path / "a.tar", files), val_fraction=0.5)
    assert sorted(pairs(data.splits["train"]) + pairs(data.splits["val"])) == [(0, 0), (1, 1), (2, 0), (3, 1)]


def test_colour_in_one_image_makes_three_channels_of_all(tmp_path):
    files = samples(0) | {"0001.png": png(0, "RGB")}
    data = open_data(write(tmp_path / "a.tar", files))
    assert data.channels == 3
    assert data.splits["train"].image(0).shape == (4, 6, 3)


# What is wrong with them


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"0500.png": png(0)[:40]}, r"0500\.png \(not an image\)"),
        ({"9.png": png(1)}, r"9\.png \(no label: no \.cls, \.json or \.txt file\)"),
        ({"9.cls": b"1"}, r"9\S* .*\(a label without an image\)"),
        ({"9.png": png(1), "9.cls": b""}, r"9\.png \(its \.cls is empty\)"),
        ({"9.png": png(1), "9.txt": b"word " * 999}, r"too long for a label"),
        ({"9.png": png(1), "9.json": b"{"}, r"no field 'label'"),
        ({"9.png": png(1), "9.json": b'{"label": [1]}'}, r"neither an integer nor text"),
        ({"9.png": png(1), "9.json": b'{"label": "\\ud800"}'}, r"its \.json is not UTF-8 text"),
        ({"9.png": png(1), "9.json": b'{"label": "%s"}' % (b"x" * 1001)}, r"9\.png \(its label is longer than 1,000"),
        ({"9.png": png(1), "9.cls": b"\xff"}, r"its \.cls is not UTF-8 text"),
    ],
)
def test_few_faulty_samples_are_left_out_by_name_and_many_are_refused(tmp_path, fault, reason):
    many = {f"{i:04}.png": png(i % 200) for i in range(200, 401)}
    many |= {f"{i:04}.cls": str(i % 2).encode() for i in range(200, 401)}
    data = open_data(write(tmp_path / "many.tar", many | fault | ({"0500.cls": b"1"} if "0500.png" in fault else {})))
    assert len(data.unreadable) == 1
    assert len(data.splits["train"]) + len(data.splits["val"]) == 201
    with pytest.raises(UserError, match=reason):
        open_data(write(tmp_path / "few.tar", samples(0) | fault | {"0500.cls": b"1"}))


@pytest.mark.parametrize("keep", [0, 700, 15_000])  # nothing; into the first label; into the last image
def test_a_cut_shard_is_a_user_error_that_names_it(tmp_path, keep):
    path = write(tmp_path / "a.tar", samples(0, 4) | {"last.png": bytes(20_000)})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"a\.tar is not a complete tar file"):
        open_data(path)


def test_a_tar_without_samples_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match=r"17\.jpg, 17\.cls"):
        open_data(write(tmp_path / "a.tar", {"readme.md": b"hello"}))


def test_an_image_column_is_refused(tmp_path):
    with pytest.raises(UserError, match="apply to tables"):
        open_data(write(tmp_path / "a.tar", samples(0)), image_column="png")


# What is remembered


def test_a_shard_is_read_once_and_again_when_it_changes(tmp_path, monkeypatch):
    path = write(tmp_path / "a.tar", samples(0))
    scanned = []
    monkeypatch.setattr(index, "_scan", lambda file, field, scan=index._scan: scanned.append(file) or scan(file, field))
    monkeypatch.setattr(
        index, "inspect_image", lambda source: scanned.append("image") or images_module.inspect_image(source)
    )
    first = open_data(path)
    assert len(scanned) == 11
    again = open_data(path)
    assert len(scanned) == 11
    for split in first.splits:
        assert pairs(first.splits[split]) == pairs(again.splits[split])
    assert (first.size, first.channels) == (again.size, again.channels)
    write(path, samples(50))
    os.utime(path, ns=(1, 1))
    assert min(value for value, _ in pairs(open_data(path).splits["train"])) >= 50
    assert len(scanned) == 22


def test_a_broken_memory_is_made_again(tmp_path):
    path = write(tmp_path / "a.tar", samples(0))
    expected = pairs(open_data(path).splits["train"])
    [kept] = (cache_folder() / "shards").iterdir()
    for content in (b"", kept.read_bytes()[:100]):
        kept.write_bytes(content)
        assert pairs(open_data(path).splits["train"]) == expected


# With the verbs


def test_batches_are_shuffled_over_all_shards_and_resume_anywhere(tmp_path):
    for i in range(4):
        write(tmp_path / f"{i}.tar", samples(10 * i))
    train = open_data(tmp_path).splits["train"]
    loader = TrainBatches(train, Preprocess((4, 6), 1), 8, seed=1)
    whole = [labels.tolist() + images[:, 0, 0, 0].tolist() for images, labels in loader.epoch(2)]
    assert [labels.tolist() + images[:, 0, 0, 0].tolist() for images, labels in loader.epoch(2, 2)] == whole[2:]
    firsts = [int(images[0, 0, 0, 0]) // 10 for images, _ in loader.epoch(0)]
    assert len(set(firsts)) > 1


def test_a_model_is_trained_evaluated_and_its_data_checked(tmp_path, small):
    for i in range(3):
        write(tmp_path / "set" / f"train-{i}.tar", samples(10 * i))
    write(tmp_path / "set" / "val-0.tar", samples(100))
    source = str(tmp_path / "set" / "{train-{0..2},val-0}.tar")
    run = vitrail.train(source, out=tmp_path, name="run", **small)
    assert vitrail.evaluate(run).confusion.sum() == 10
    assert vitrail.evaluate(run, source, split="train").confusion.sum() == 30
    found = audit(tmp_path / "set")
    assert found.images == 40
    assert found.counts == {"0": {"train": 15, "val": 5}, "1": {"train": 15, "val": 5}}
    assert np.array_equal(found.items[0].read(), np.full((4, 6, 1), 0))
