"""`vitrail shard`: what is written is what was there, also after a kill, and other programs can read it."""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path

import boxes_made
import numpy as np
import pytest
import segmented
from PIL import Image

import vitrail
from vitrail.data import open_data
from vitrail.data.shards import write
from vitrail.data.shards.fetch import file_sha256
from vitrail.errors import UserError


def photos(folder: Path, count: int = 24) -> Path:
    """JPEG files of two classes, in folders; image i is grey, of value 10 i."""
    for i in range(count):
        path = folder / ("cat", "dog")[i % 2] / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 6), (10 * i,) * 3).save(path)
    return folder


def contents(split) -> dict[str, bytes]:
    return {Path(split.name(i)).name: split.source(i)() for i in range(len(split))}


def members(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}


def test_files_are_copied_byte_for_byte_with_their_labels_and_splits(tmp_path):
    source = open_data(photos(tmp_path / "photos"))
    manifest = vitrail.shard(tmp_path / "photos", tmp_path / "out", shard_size="6")
    assert {name: len(split.shards) for name, split in manifest.splits.items()} == {"train": 4, "val": 1}
    data = open_data(tmp_path / "out")
    assert (data.name, data.classes, data.size, data.channels) == ("out", ("cat", "dog"), (6, 8), source.channels)
    for name, split in data.splits.items():
        theirs = source.splits[name]
        expected = {Path(theirs.name(i)).name: theirs.source(i).read_bytes() for i in range(len(theirs))}
        assert contents(split) == expected
        for i in range(len(split)):
            assert Path(split.name(i)).parent.name == data.classes[split.targets[i]]


def test_training_images_are_shuffled_by_the_seed_and_the_rest_keeps_its_order(tmp_path):
    photos(tmp_path / "photos")
    names = {}
    for seed in (0, 1):
        vitrail.shard(tmp_path / "photos", tmp_path / f"{seed}", shard_size="100", seed=seed)
        split = open_data(tmp_path / f"{seed}").splits["train"]
        names[seed] = [Path(split.name(i)).stem for i in range(len(split))]
    assert names[0] != sorted(names[0], key=int)
    assert names[0] != names[1]
    val = open_data(tmp_path / "0").splits["val"]
    source = open_data(tmp_path / "photos").splits["val"]
    assert [Path(val.name(i)).name for i in range(len(val))] == [Path(source.name(i)).name for i in range(len(source))]


def test_other_programs_and_a_lost_manifest_give_the_same_labels(tmp_path):
    vitrail.shard(photos(tmp_path / "photos"), tmp_path / "out", shard_size="10")
    first = members(tmp_path / "out" / "train-00000.tar")
    assert list(first)[:2] == ["000000000.jpg", "000000000.cls"]
    data = open_data(tmp_path / "out")
    (tmp_path / "out" / "shards.json").unlink()
    again = open_data(tmp_path / "out")
    assert again.classes == data.classes
    for name, split in data.splits.items():
        assert [split.source(i)() for i in range(len(split))] == [
            again.splits[name].source(i)() for i in range(len(split))
        ]
        assert split.targets.tolist() == again.splits[name].targets.tolist()


@pytest.mark.parametrize(
    ("dtype", "channels", "end"),
    [("uint8", 1, ".png"), ("uint8", 3, ".png"), ("uint16", 1, ".png"), ("uint8", 5, ".npy")],
)
def test_arrays_are_encoded_without_loss(tmp_path, dtype, channels, end):
    pixels = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, (20, 6, 7, channels)).astype(dtype)
    vitrail.shard((pixels, np.arange(20) % 2), tmp_path / "out", val_fraction=0.5)
    data = open_data(tmp_path / "out")
    assert {Path(name).suffix for name in members(tmp_path / "out" / "train-00000.tar")} == {end, ".cls"}
    found = [split.image(i) for split in data.splits.values() for i in range(len(split))]
    assert sorted(image.tobytes() for image in found) == sorted(image.tobytes() for image in pixels)
    assert {image.dtype for image in found} == {np.dtype(dtype)}


def test_labels_of_every_plain_task_and_no_labels(tmp_path):
    photos(tmp_path / "photos", 20)
    files = sorted(str(path.relative_to(tmp_path)) for path in (tmp_path / "photos").rglob("*.jpg"))
    tables = {
        "multilabel": ["image,a,b", *(f"{file},{i % 2},{i % 3 == 0:d}" for i, file in enumerate(files))],
        "regression": ["image,x", *(f"{file},{i / 7:.3f}" for i, file in enumerate(files))],
        "pairs": ["image,caption", *(f"{file},a grey picture number {i}" for i, file in enumerate(files))],
    }
    for task, lines in tables.items():
        table = tmp_path / f"{task}.csv"
        table.write_text("\n".join(lines))
        column = {"multilabel": ["a", "b"], "regression": "x", "pairs": "caption"}[task]
        source = open_data(table, label_column=column, task=task)
        vitrail.shard(table, tmp_path / task, label_column=column, task=task, shard_size="4")
        data = open_data(tmp_path / task)
        assert data.task == source.task
        for name, split in source.splits.items():
            theirs = {Path(split.name(i)).name: split.targets[i].tobytes() for i in range(len(split))}
            ours = data.splits[name]
            assert {Path(ours.name(i)).name: ours.targets[i].tobytes() for i in range(len(ours))} == theirs
    assert members(tmp_path / "pairs" / "val-00000.tar")["000000000.txt"].startswith(b"a grey picture number")
    assert json.loads(members(tmp_path / "multilabel" / "val-00000.tar")["000000000.json"]).keys() == {
        "label",
        "target",
    }


def test_shards_without_labels_serve_pretraining_alone(tmp_path):
    vitrail.shard(photos(tmp_path / "photos"), tmp_path / "out", unlabelled=True)
    assert open_data(tmp_path / "out", task="mae").splits["train"].targets.shape[1] == 0
    assert not [name for name in members(tmp_path / "out" / "train-00000.tar") if not name.endswith(".jpg")]
    with pytest.raises(UserError, match="no labels"):
        open_data(tmp_path / "out")


def test_finished_shards_survive_a_kill(tmp_path, monkeypatch):
    photos(tmp_path / "photos")
    vitrail.shard(tmp_path / "photos", tmp_path / "whole", shard_size="3")
    real, written = write._write, []

    def interrupted(folder, job):
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(job.file)
        return real(folder, job)

    with monkeypatch.context() as patch:
        patch.setattr(write, "_write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            vitrail.shard(tmp_path / "photos", tmp_path / "out", shard_size="3", workers=1)
    before = {path.name: path.stat().st_ino for path in (tmp_path / "out").glob("*.tar")}
    assert sorted(before) == sorted(written)
    with pytest.raises(UserError, match="unfinished shards of other data, another --shard-size"):
        vitrail.shard(tmp_path / "photos", tmp_path / "out", shard_size="4")
    damaged = tmp_path / "out" / written[0]
    content = damaged.read_bytes()
    damaged.write_bytes(content[:600] + bytes([content[600] ^ 1]) + content[601:])
    vitrail.shard(tmp_path / "photos", tmp_path / "out", shard_size="3")
    del before[damaged.name]  # written again
    assert {name: (tmp_path / "out" / name).stat().st_ino for name in before} == before
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == {
        path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()
    }


def test_shards_that_were_all_written_when_killed_are_those_of_their_data(tmp_path, monkeypatch):
    def interrupted(_: Path) -> None:
        raise KeyboardInterrupt

    for name, count in (("first", 24), ("other", 22)):
        photos(tmp_path / name, count)
        with monkeypatch.context() as patch:
            patch.setattr(write.shutil, "rmtree", interrupted)
            with pytest.raises(KeyboardInterrupt):
                vitrail.shard(tmp_path / "first", tmp_path / f"{name} shards")
    assert vitrail.shard(tmp_path / "first", tmp_path / "first shards").splits["train"].index.images == 20
    with pytest.raises(UserError, match="already has shards"):
        vitrail.shard(tmp_path / "other", tmp_path / "other shards")
    assert not [*tmp_path.rglob(".unfinished")]


def test_sizes_are_images_or_bytes(tmp_path):
    split = open_data(photos(tmp_path / "photos")).splits["train"]
    size = len(split.source(0).read_bytes())
    assert write.images_per_shard(split, "7") == 7
    assert write.images_per_shard(split, "40KB") == int(40_000 / (-(-size // 512) * 512 + 3 * 512))
    assert write.images_per_shard(split, "0.1kb") == 1
    for wrong in ("0", "-1", "x", "5 apples", "", "nan"):
        with pytest.raises(UserError, match="'shard_size' must be"):
            vitrail.shard(tmp_path / "photos", tmp_path / "out", shard_size=wrong)
    assert not (tmp_path / "out").exists()


def test_folders_that_are_in_use_are_refused(tmp_path):
    photos(tmp_path / "photos")
    with pytest.raises(UserError, match="has other files"):
        vitrail.shard(tmp_path / "photos", tmp_path / "photos")
    vitrail.shard(tmp_path / "photos", tmp_path / "out")
    with pytest.raises(UserError, match="already has shards"):
        vitrail.shard(tmp_path / "photos", tmp_path / "out")


@pytest.mark.parametrize("kind", ["masks", "boxes"])
def test_annotations_are_those_of_the_folder(kind, tmp_path):
    folder = segmented.folder(tmp_path / "in") if kind == "masks" else boxes_made.voc(tmp_path / "in", 20)
    source = open_data(folder)
    vitrail.shard(folder, tmp_path / "out", shard_size="7")
    data = open_data(tmp_path / "out")
    assert data.task == source.task
    for name, split in data.splits.items():
        theirs = source.splits[name]
        places = {Path(theirs.name(i)).name: i for i in range(len(theirs))}
        assert len(places) == len(split)
        for i, mine in enumerate(split.targets):
            target = theirs.targets[places[Path(split.name(i)).name]]
            if kind == "boxes":
                np.testing.assert_array_equal(mine, target)
                continue
            np.testing.assert_array_equal(mine.labels(), target.labels())
            np.testing.assert_array_equal(mine.counts, target.counts)
            swapped = np.arange(len(data.classes))[::-1]
            np.testing.assert_array_equal(
                mine.renumbered(swapped, len(swapped)).labels(), target.renumbered(swapped, len(swapped)).labels()
            )
    found = members(tmp_path / "out" / "train-00000.tar")
    if kind == "masks":
        assert Image.open(io.BytesIO(found["000000000.mask.png"])).size == source.splits["train"].image(0).shape[1::-1]
    else:
        objects = json.loads(found["000000000.json"])["objects"]
        first = data.splits["train"].targets[0]
        assert [[data.classes.index(o["class"]), *o["box"], o["ignored"]] for o in objects] == first.tolist()


def test_annotations_in_shards_are_checked(tmp_path):
    vitrail.shard(boxes_made.voc(tmp_path / "in", 20), tmp_path / "out")
    index = tmp_path / "out" / "train.index.npy"
    rows = np.load(index)
    rows["target"][0, 0, 0] = 99  # no such class
    np.save(index, rows)
    manifest = json.loads((tmp_path / "out" / "shards.json").read_text())
    manifest["splits"]["train"]["index"]["sha256"] = file_sha256(index)
    (tmp_path / "out" / "shards.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="its targets are not those of detection"):
        open_data(tmp_path / "out")


@pytest.mark.parametrize(
    ("classes", "message"),
    [(["cat", "cat"], "two of its classes have the same name"), (["cat", "\ud800"], "is not valid UTF-8 text")],
)
def test_a_manifest_names_each_class_once_in_text(tmp_path, classes, message):
    vitrail.shard(photos(tmp_path / "photos"), tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "shards.json").read_text())
    (tmp_path / "out" / "shards.json").write_text(json.dumps({**manifest, "classes": classes}))
    with pytest.raises(UserError, match=message):
        vitrail.check(tmp_path / "out")


def test_an_index_that_becomes_shorter_in_use(tmp_path):
    vitrail.shard(photos(tmp_path / "photos"), tmp_path / "out")
    split = open_data(tmp_path / "out").splits["train"]
    os.truncate(tmp_path / "out" / "train.index.npy", 0)
    for read in (split.image, split.name):
        with pytest.raises(UserError, match=r"train\.index\.npy has become shorter while it was in use"):
            read(3)


def test_the_command_prints_what_it_wrote(tmp_path, vitrail_says):
    photos(tmp_path / "photos")
    code, said, _ = vitrail_says("shard", tmp_path / "photos", tmp_path / "out", "--shard-size", "10")
    assert code == 0
    assert f"{tmp_path}/out/train: 20 images in 2 shards" in said


def test_an_image_that_was_encoded_by_others_keeps_its_format():
    for kind, end in (("WEBP", ".webp"), ("JPEG", ".jpg"), ("TIFF", ".tif")):
        stream = io.BytesIO()
        Image.new("RGB", (4, 4)).save(stream, kind)
        assert write._extension(stream.getvalue()) == end
