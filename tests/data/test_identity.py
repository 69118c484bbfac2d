"""What counts as changed data between the start of a run and its resumption."""

from __future__ import annotations

import json
import shutil

import boxes_made
import captioned
import numpy as np
import pytest
import segmented
from PIL import Image

import vitrail
from vitrail.data import open_data
from vitrail.data.identity import differences, identity
from vitrail.errors import UserError

pytestmark = pytest.mark.usefixtures("plain_runs")


@pytest.fixture
def images(digits, tmp_path):
    return shutil.copytree(digits, tmp_path / "images")


def changes(folder, change, task=None):
    before = identity(open_data(str(folder), task=task))
    change()
    return differences(before, identity(open_data(str(folder), task=task)))


def test_a_copy_in_another_place_is_the_same_data(images, tmp_path):
    before = identity(open_data(str(images)))
    copy = shutil.copytree(images, tmp_path / "elsewhere" / "copy", copy_function=shutil.copyfile)  # new times
    assert differences(before, identity(open_data(str(copy)))) == []


def test_overwritten_images(images):
    assert changes(images, lambda: Image.new("L", (8, 8)).save(next((images / "3").iterdir()))) == [
        "the content of the images"
    ]


def test_images_in_another_order(images):
    file = sorted((images / "3").iterdir())[0]
    assert "the names or the order of the images" in changes(images, lambda: file.rename(file.with_name("zzz.png")))


def test_swapped_classes(images):
    def swap():
        (images / "3").rename(images / "x")
        (images / "4").rename(images / "3")
        (images / "x").rename(images / "4")

    assert changes(images, swap) != []


def test_other_classes_and_numbers(images):
    assert changes(images, lambda: (images / "3").rename(images / "three")) == ["the classes (new three; missing 3)"]
    found = changes(images, lambda: [file.unlink() for file in sorted((images / "4").iterdir())[:5]])
    assert any("train has" in text for text in found)


def test_arrays(tmp_path):
    pixels, labels = np.random.default_rng(0).integers(0, 256, (40, 8, 8), np.uint8), np.arange(40) % 2

    def save():
        np.savez(tmp_path / "a.npz", images=pixels, labels=labels)

    save()
    assert changes(tmp_path / "a.npz", save) == []
    pixels[:] = pixels[::-1]
    assert changes(tmp_path / "a.npz", lambda: None) == []
    before = identity(open_data(str(tmp_path / "a.npz")))
    save()
    assert differences(before, identity(open_data(str(tmp_path / "a.npz")))) == ["the content of the images"]


def test_masks(tmp_path):
    folder = segmented.folder(tmp_path / "masks", images=6, val=2)
    file = folder / "masks" / "train" / "0.png"

    def paint():
        with Image.open(file) as mask:
            mask.load()
        mask.putpixel((0, 0), (mask.getpixel((0, 0)) + 1) % 3)
        mask.save(file)

    assert changes(folder, lambda: shutil.copyfile(file, file.with_suffix(".bak")), "masks") == []
    assert changes(folder, lambda: file.with_suffix(".bak").replace(file), "masks") == []  # the same, with a new time
    assert changes(folder, paint, "masks") == ["the labels"]


def test_boxes_and_polygons(tmp_path):
    boxes_made.coco(tmp_path / "boxes")
    segmented.labelme(tmp_path / "polygons")

    def move():
        for file, *path in (
            (tmp_path / "boxes/annotations/instances_train.json", "annotations", 0, "bbox"),
            (tmp_path / "polygons/0.json", "shapes", 0, "points", 0),
        ):
            document = place = json.loads(file.read_text())
            for key in path:
                place = place[key]
            place[0] += 1
            file.write_text(json.dumps(document))

    before = identity(open_data(str(tmp_path / "boxes")))
    assert changes(tmp_path / "polygons", move, "masks") == ["the labels"]
    assert differences(before, identity(open_data(str(tmp_path / "boxes")))) == ["the labels"]


def test_captions(tmp_path):
    captioned.captioned(tmp_path, each=1)
    files = [picture.with_suffix(".txt") for picture in sorted(tmp_path.glob("*.png"))]
    for file in files:
        file.write_text(file.stem)
    assert changes(tmp_path, lambda: files[0].write_text("another"), "pairs") == ["the labels"]


def test_checkpoints_of_earlier_versions_know_only_the_labels():
    now = identity(open_data("digits"))
    assert differences(now["labels"], now) == []
    assert differences("other", now) == ["other images, labels or classes"]


def test_a_run_goes_on_with_changed_data_only_if_asked_to(images, tmp_path, tiny, caplog):
    run = vitrail.train(str(images), out=tmp_path, name="run", **tiny).path
    Image.new("L", (8, 8)).save(next((images / "3").iterdir()))
    with pytest.raises(UserError, match=r"changed since the run began: the content of the images\. .*--data-changed"):
        vitrail.train(resume=run)
    vitrail.train(resume=run, data_changed=True)
    assert any("The data has changed since the run began" in message for message in caplog.messages)
    with pytest.raises(UserError, match="Add --resume RUN"):
        vitrail.train(str(images), data_changed=True)
