"""Masks, boxes, captions, indexes and studies that claim more than they hold or have the wrong types: one sentence."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import boxes_made
import numpy as np
import pytest
import segmented
from PIL import Image

import vitrail
from vitrail.data import open_data
from vitrail.data.boxes import yolo
from vitrail.data.masks.raw import decode_runs
from vitrail.data.pixels import UnreadableImage
from vitrail.errors import UserError
from vitrail.studies.execute import Folder
from vitrail.tasks.captions import pack
from vitrail.tokenizers import Tokenizer

HUGE = 10**9
DEEP = "[" * 100_000


def changed(file: Path, *path: str | int, value: Any) -> None:
    """Sets a value in a JSON file."""
    document = inner = json.loads(file.read_text())
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    file.write_text(json.dumps(document))


# Masks


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("imageHeight",), HUGE),
        (("shapes",), [1]),
        (("shapes", 0, "points"), [[1, 2], [3, 4], [1e300, 5]]),
        (("shapes", 0, "points"), [[1, 2], [3, 4], [float("nan"), 5]]),
        (("shapes", 0, "points"), [[1, 2], [3, 4], [5]]),
        (("shapes", 0, "points"), "points"),
        (("shapes", 0, "label"), "\ud800"),
    ],
    ids=str,
)
def test_polygons_of_labelme(tmp_path, path, value):
    segmented.labelme(tmp_path)
    changed(tmp_path / "0.json", *path, value=value)
    with pytest.raises(UserError):
        open_data(str(tmp_path), task="masks")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("images", 0, "height"), HUGE),
        (("images", 0, "height"), "x"),
        (("images", 0, "file_name"), ["0.jpg"]),
        (("annotations", 0, "image_id"), [1]),
        (("annotations", 0, "category_id"), {}),
        (("annotations", 0, "segmentation"), {"counts": [-5, 605]}),
        (("annotations", 0, "segmentation"), {"counts": [10**400]}),
        (("annotations", 0, "segmentation"), {"counts": "o" * 100_000}),
        (("annotations", 0, "segmentation"), [[10**400] * 6]),
        (("annotations",), 7),
        (("categories",), [7]),
    ],
    ids=lambda value: str(value)[:30],
)
def test_masks_of_coco(tmp_path, path, value):
    segmented.coco(tmp_path)
    changed(tmp_path / "annotations.json", *path, value=value)
    with pytest.raises(UserError) as caught:
        open_data(str(tmp_path), task="masks")
    assert len(str(caught.value)) < 1000


def test_run_lengths_that_are_too_long():
    for runs in ([-1, 5], [10**5000], b"o" * 1000):
        with pytest.raises(UnreadableImage):
            decode_runs(runs, (2, 2))


@pytest.mark.parametrize("line", ["road:1,2", "road:1,2,999::", "road:" + "9" * 5000 + ",1,2::", "\udcff:1,2,3::"])
def test_maps_of_labels(tmp_path, line):
    segmented.pairs(tmp_path, "JPEGImages", "SegmentationClass")
    (tmp_path / "labelmap.txt").write_text(line, errors="surrogateescape")
    with pytest.raises(UserError, match=r"labelmap\.txt") as caught:
        open_data(str(tmp_path), task="masks")
    assert len(str(caught.value)) < 1000


# Boxes


def test_entities_are_not_expanded(tmp_path):
    boxes_made.voc(tmp_path)
    entities = "".join(f'<!ENTITY e{i + 1} "{f"&e{i};" * 10}">' for i in range(9))
    bomb = f'<!DOCTYPE a [<!ENTITY e0 "x">{entities}]><annotation><object><name>&e9;</name></object></annotation>'
    for text in (bomb.encode(), bomb.encode("utf-16"), b'<!DOCTYPE a [<!ENTITY e SYSTEM "/etc/passwd">]><annotation/>'):
        (tmp_path / "Annotations" / "0.xml").write_bytes(text)
        with pytest.raises(UserError, match=r"0\.xml is not valid XML: it defines entities"):
            open_data(str(tmp_path))


def test_deep_xml(tmp_path):
    boxes_made.voc(tmp_path)
    (tmp_path / "Annotations" / "0.xml").write_text("<annotation>" + "<a>" * 200_000)
    with pytest.raises(UserError, match=r"0\.xml"):
        open_data(str(tmp_path))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("images", 0, "id"), [1]),
        (("images", 0, "height"), "x"),
        (("annotations", 0, "bbox"), [10**400, 0, 1, 1]),
        (("annotations", 0, "bbox"), [1e300, 0, 1, 1]),
        (("annotations", 0, "image_id"), 10**5),
        (("categories", 0, "name"), "\ud800"),
        (("categories", 0, "id"), {}),
    ],
    ids=lambda value: str(value)[:30],
)
def test_boxes_of_coco(tmp_path, path, value):
    boxes_made.coco(tmp_path)
    changed(tmp_path / "annotations" / "instances_train.json", *path, value=value)
    with pytest.raises(UserError) as caught:
        open_data(str(tmp_path))
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("text", ["names: [a]\ntrain: [[1]]", f"names: {DEEP}", "names: {a: b}", "names: &a [*a]\n"])
def test_settings_of_yolo(tmp_path, text):
    boxes_made.yolo(tmp_path, text)
    with pytest.raises(UserError, match=r"data\.yaml"):
        open_data(str(tmp_path))


def test_a_split_of_yolo_that_is_the_whole_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(yolo, "_OTHERS", 50)
    for i in range(60):
        (tmp_path / f"{i:02}.log").touch()
    boxes_made.yolo(tmp_path / "a")
    assert open_data(str(tmp_path / "a")).task.name == "boxes"
    boxes_made.yolo(tmp_path / "b", f"names: [disc, square]\npath: {tmp_path}\ntrain: .\n")
    with pytest.raises(UserError, match=r"is not a folder of images: it has 0 among 51 files\. Correct 'path' or"):
        open_data(str(tmp_path / "b"))


# Words


def test_files_of_annotations_that_are_fifos(tmp_path):
    files = {
        segmented.labelme(tmp_path / "a") / "0.json": "masks",
        segmented.coco(tmp_path / "b") / "annotations.json": "masks",
        boxes_made.voc(tmp_path / "c") / "Annotations" / "0.xml": "boxes",
        boxes_made.coco(tmp_path / "d") / "annotations" / "instances_train.json": "boxes",
        boxes_made.yolo(tmp_path / "e") / "data.yaml": "boxes",
    }
    for file, task in files.items():
        file.unlink()
        os.mkfifo(file)
        with pytest.raises(UserError):
            open_data(str(tmp_path / file.relative_to(tmp_path).parts[0]), task=task)


def coco_captions(folder: Path) -> Path:
    for i in range(4):
        Image.new("RGB", (8, 8), (60 * i, 0, 0)).save(folder / f"{i}.png")
    images = [{"id": i, "file_name": f"{i}.png"} for i in range(4)]
    captions = [{"image_id": i, "caption": f"number {i}"} for i in range(4)]
    (folder / "c.json").write_text(json.dumps({"images": images, "annotations": captions}))
    return folder / "c.json"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("annotations", 0, "caption"), None, "a caption is None"),
        (("annotations", 0, "caption"), 5, "a caption is 5"),
        (("annotations", 0, "image_id"), 9, "no image has the id 9 of an annotation"),
        (("images", 0, "id"), 1, "two images have the same id"),
        (("images", 0, "file_name"), None, "a file_name is None"),
    ],
    ids=str,
)
def test_entries_of_coco_captions(tmp_path, path, value, message):
    file = coco_captions(tmp_path)
    changed(file, *path, value=value)
    with pytest.raises(UserError, match=message):
        open_data(str(file))


def test_one_image_with_captions_for_all(tmp_path):
    """Every image takes the memory of as many captions as one has."""
    file = coco_captions(tmp_path)
    many = [{"image_id": 0, "caption": f"number {i}"} for i in range(2000)]
    changed(file, "annotations", value=many + [{"image_id": i, "caption": "a"} for i in range(4)])
    with pytest.raises(UserError, match="The image of 'number 0' has 2,001 captions"):
        open_data(str(file))
    with pytest.raises(UserError, match="has 900 captions"):
        pack(["\n".join(f"{i} " + "x" * 990 for i in range(900)), *["a"] * 10_000])


def test_captions_with_half_a_character(tmp_path):
    for i in range(4):
        boxes_made.image(tmp_path / f"{i}.png", seed=i)
    images = [{"id": i, "file_name": f"{i}.png"} for i in range(4)]
    captions = [{"image_id": i, "caption": f"a dog \ud83d number {i}"} for i in range(4)]
    (tmp_path / "c.json").write_text(json.dumps({"images": images, "annotations": captions}))
    data = open_data(str(tmp_path / "c.json"))
    assert data.task.name == "pairs"


def test_tokenizers_read_any_text():
    tokenizer = Tokenizer("bpe", ("a b", "ab c", "b c", "a bc"))  # two merges with the same text
    rows = tokenizer.encode(["abc", "\ud800", "x" * 10**6, "&" * 1000], 16)
    assert rows.max() == tokenizer.end
    assert tokenizer.vocab == 512 + 4 + 2


def test_an_index_that_is_none(trained, tmp_path):
    picture = str(boxes_made.image(tmp_path / "a.png"))
    index = tmp_path / "index.npz"
    how: dict[str, Any] = {"index": index, "engine": "torch", "device": "cpu"}
    vitrail.search(trained, [picture], picture, **how)
    with np.load(index) as file:
        arrays = dict(file)
    damages: list[dict[str, Any]] = [
        {"vectors": arrays["vectors"][:, :3]},
        {"vectors": arrays["vectors"] * np.nan},
        {"vectors": arrays["vectors"][0]},
        {"files": arrays["files"][:0]},
        {"model": np.array("another")},
    ]
    for damage in damages:
        np.savez(index, **{**arrays, **damage})
        with pytest.raises(UserError, match=r"index"):
            vitrail.search(trained, [picture], picture, **how)
    index.unlink()
    os.mkfifo(index)
    with pytest.raises(UserError, match="not a regular file"):
        vitrail.search(trained, [picture], picture, **how)


# Studies


@pytest.mark.parametrize("text", ["[]", DEEP, '{"study": 1}', '{"scores": {"a": "x"}}', '{"scores": {"a": {}}}'])
def test_plans_and_records_of_studies(tmp_path, text):
    (tmp_path / "records").mkdir()
    for file in (tmp_path / "plan.json", tmp_path / "records" / "job.json"):
        file.write_text(text)
    with pytest.raises(UserError, match=r"plan\.json"):
        _ = Folder(tmp_path).plan
    job: Any = type("Job", (), {"name": "job"})
    with pytest.raises(UserError, match=r"job\.json.*Delete it: the run is measured again"):
        Folder(tmp_path).scores(job)
