"""Every layout of boxes gives the same data set; bad data is refused or repaired, each with one sentence."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from boxes_made import SIZE, coco, coco_json, image, table, voc, voc_xml, yolo, yolo_line
from PIL import Image

from vitrail import UserError, check, shard
from vitrail.data import open_data

EXPECTED = [[0, 4, 6, 20, 22, 0], [1, 30, 10, 60, 40, 0]]


@pytest.mark.parametrize("make", [voc, coco, yolo, table])
def test_every_layout_gives_the_same_boxes(make, tmp_path):
    data = open_data(make(tmp_path))
    assert data.task.name == "boxes"
    assert data.classes == ("disc", "square")
    assert sum(map(len, data.splits.values())) == 6
    for split in data.splits.values():
        for boxes in split.targets:
            np.testing.assert_allclose(boxes, EXPECTED, atol=1e-4)


def test_lists_of_voc_are_splits_and_voc_itself_counts_from_one(tmp_path):
    root = voc(tmp_path)
    (root / "ImageSets" / "Main").mkdir(parents=True)
    (root / "ImageSets" / "Main" / "train.txt").write_text("0\n1\n2\n")
    (root / "ImageSets" / "Main" / "val.txt").write_text("3\n")
    text = voc_xml(name="3.png", extra="<difficult>1</difficult>")
    text = text.replace("<filename>", "<source><database>The VOC2007 Database</database></source><filename>")
    (root / "Annotations" / "3.xml").write_text(text)
    data = open_data(root)
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 3, "val": 1}
    assert data.splits["val"].targets[0].tolist() == [[0, 3, 5, 20, 22, 1], [1, 29, 9, 60, 40, 1]]


def test_areas_of_coco_decide_the_size_of_objects_also_in_shards(tmp_path):
    document = coco_json()
    for each in document["annotations"]:
        if each["category_id"] == 11:  # 30x30
            each["area"] = 500.5
    data = open_data(coco(tmp_path / "a", document))
    shard(tmp_path / "a", tmp_path / "shards")
    for found in (data, open_data(tmp_path / "shards")):
        for boxes in (boxes for split in found.splits.values() for boxes in split.targets):
            assert boxes.tolist() == [[*EXPECTED[0], 256], [*EXPECTED[1], 500.5]]
        assert found.task.reorder(boxes[None], found.classes)[0].shape == (2, 7)
    with pytest.raises(UserError, match="'area' must be a number, but it is 'big'"):
        open_data(coco(tmp_path / "b", {**document, "annotations": [document["annotations"][0] | {"area": "big"}]}))


def test_crowds_of_coco_are_ignored_and_polygons_of_yolo_bounded(tmp_path):
    document = coco_json()
    document["annotations"][0]["iscrowd"] = 1
    targets = np.concatenate([split.targets for split in open_data(coco(tmp_path / "a", document)).splits.values()])
    assert sum(float(boxes[:, 5].sum()) for boxes in targets) == 1
    root = yolo(tmp_path / "b")
    (root / "labels" / "train" / "0.txt").write_text("0 0.25 0.25 0.5 0.25 0.5 0.75\n")
    (root / "labels" / "train" / "1.txt").unlink()
    found = open_data(root).splits["train"].targets
    np.testing.assert_allclose(found[0], [[0, 16, 12, 32, 36, 0]], atol=1e-4)
    assert found[1].shape == (0, 6)


def xml(text: str) -> Callable[[Path], Path]:
    def make(root: Path) -> Path:
        (voc(root) / "Annotations" / "0.xml").write_text(text)
        return root

    return make


def objects(*listed: Any) -> Callable[[Path], Path]:
    return xml(voc_xml([*listed, ("disc", (1, 1, 9, 9)), ("square", (2, 2, 30, 30))]))


def json_with(**changes: Any) -> Callable[[Path], Path]:
    return lambda root: coco(root, coco_json() | changes)


def annotation(**changes: Any) -> Callable[[Path], Path]:
    def make(root: Path) -> Path:
        document = coco_json()
        document["annotations"][0] |= changes
        return coco(root, document)

    return make


def label(line: str) -> Callable[[Path], Path]:
    def make(root: Path) -> Path:
        (yolo(root) / "labels" / "train" / "0.txt").write_text(line + "\n")
        return root

    return make


def described(text: str) -> Callable[[Path], Path]:
    return lambda root: yolo(root, text)


def rows(*listed: str, header: str = "image,label,xmin,ymin,xmax,ymax") -> Callable[[Path], Path]:
    return lambda root: table(root, header, list(listed))


def turned(root: Path) -> Path:
    image(voc(root) / "JPEGImages" / "0.jpg", rotation=6)
    (root / "JPEGImages" / "0.png").unlink()
    return root


def listed_in_vain(root: Path) -> Path:
    (voc(root) / "ImageSets" / "Main").mkdir(parents=True)
    (root / "ImageSets" / "Main" / "train.txt").write_text("0\n77\n")
    return root


def without_image(root: Path) -> Path:
    (voc(root) / "JPEGImages" / "0.png").unlink()
    return root


def doubled(root: Path) -> Path:
    document = coco_json()
    document["images"].append({"id": 999, "file_name": "0.png"})
    return coco(root, document)


def no_objects(root: Path) -> Path:
    return coco(root, coco_json() | {"annotations": []})


def lost_class(root: Path) -> Path:
    root = yolo(root)
    for file in (root / "labels" / "train").iterdir():
        file.write_text(yolo_line(0, (4, 6, 20, 22)))
    return root


def all_outside(root: Path) -> Path:
    voc(root)
    for i in range(6):
        (root / "Annotations" / f"{i}.xml").write_text(voc_xml([("disc", (400, 4, 500, 40))], name=f"{i}.png"))
    return root


REFUSED = {
    "not XML": (xml("<annotation>"), "0.xml is not valid XML: .*"),
    "another XML": (xml("<svg/>"), "must be an <annotation>, as in Pascal VOC, but it is a <svg>"),
    "no name": (xml(voc_xml([("", (1, 1, 9, 9))])), "one has no <name>"),
    "no box": (xml("<annotation><object><name>a</name></object></annotation>"), "one has no <bndbox>"),
    "words for numbers": (objects(("disc", ("one", 1, 9, 9))), "<xmin> must be a number, but it is 'one'"),
    "not a number": (objects(("disc", ("nan", 1, 9, 9))), "<xmin> must be a number, but it is 'nan'"),
    "EXIF rotation": (turned, "0.jpg is 48x64 after its EXIF rotation, but .*0.xml says 64x48: the boxes lie on the"),
    "another size": (xml(voc_xml(size=(96, 128))), "is 64x48, but .*0.xml says 128x96, so its boxes lie elsewhere"),
    "listed without annotation": (listed_in_vain, "lists 77, but .*77.xml does not exist"),
    "annotation without image": (without_image, "0.xml has no image"),
    "all outside": (all_outside, "6 of 6 boxes of .* have no area or lie outside their image: 'disc' at 400, 4"),
    "not JSON": (lambda root: _broken(coco(root)), "instances_train.json is not valid JSON"),
    "no categories": (json_with(categories=None), "must have a list 'categories'"),
    "category without a name": (json_with(categories=[{"id": 7}]), "an entry has no 'name': {'id': 7}"),
    "two categories of a name": (
        json_with(categories=[{"id": 7, "name": "disc"}, {"id": 11, "name": "disc"}]),
        "two categories named 'disc'",
    ),
    "unknown category": (annotation(category_id=1), "has category 1, which is not in 'categories': 7, 11"),
    "unknown image": (annotation(image_id=1), "is of image 1, which is not in 'images'"),
    "short box": (annotation(bbox=[1, 2, 3]), r"'bbox' must be \[x, y, width, height\], but it is \[1, 2, 3\]"),
    "null in a box": (
        annotation(bbox=[1, 2, 3, None]),
        "a value of 'bbox' must be a number, but it is None",
    ),
    "an image twice": (doubled, "0.png is listed twice in"),
    "no objects": (no_objects, "No training image of .* has a box"),
    "not YAML": (described("names: [a\n"), "data.yaml is not a YAML file"),
    "counts of classes": (
        described("names: [a, b]\nnc: 3\ntrain: images/train\n"),
        "'nc' is 3, but there are 2 'names'",
    ),
    "no split": (described("names: [a, b]\n"), "must name the folder of the images of a split"),
    "no folder": (described("names: [a, b]\ntrain: pictures\n"), "the folder of train, pictures, does not exist"),
    "unknown class": (label("5 0.5 0.5 0.1 0.1"), "class 5 is not among the 2 names of data.yaml, counted from 0"),
    "pixels for shares": (label("0 20 20 10 10"), "values must be shares of the image, from 0 to 1, but one is 20"),
    "short line": (label("0 0.5 0.5 0.1"), "must be 'class cx cy w h' or a polygon, but it has 4 values"),
    "class in val only": (lost_class, "No training image of .* has a 'square'"),
    "box without class": (rows("0.png,,1,2,3,4"), "row 2 has a box but no label"),
    "box with a gap": (rows("0.png,disc,1,2,,4"), "'xmax' of row 2 must be a number, but it is ''"),
    "two splits": (
        rows("0.png,disc,1,2,9,9,train", "0.png,disc,5,5,9,9,val", header="image,label,xmin,ymin,xmax,ymax,split"),
        "row 3 puts .*0.png into val, but another row into train",
    ),
}


def _broken(root: Path) -> Path:
    file = root / "annotations" / "instances_train.json"
    file.write_text(file.read_text()[:-20])
    return root


@pytest.mark.parametrize("case", REFUSED)
def test_bad_data_is_refused_in_one_sentence(case, tmp_path):
    make, message = REFUSED[case]
    with pytest.raises(UserError, match=message) as refused:
        open_data(make(tmp_path))
    assert "\n" not in str(refused.value)


def numbered(root: Path, *places: tuple[int, int, int, int, int]) -> list[list[float]]:
    """The boxes of instance masks with these numbers at y0, y1, x0, x1."""
    for i in range(4):
        image(root / "images" / f"{i}.png", seed=i)
        mask = np.zeros(SIZE, np.uint8)
        for number, y0, y1, x0, x1 in places:
            mask[y0:y1, x0:x1] = number
        (root / "masks").mkdir(exist_ok=True)
        Image.fromarray(mask).save(root / "masks" / f"{i}.png")
    found = open_data(root, task="boxes").splits["train"].targets[0]
    return found[:, 1:5].tolist()


def test_one_object_numbered_1_has_a_box(tmp_path):
    assert numbered(tmp_path, (1, 5, 20, 10, 30)) == [[10, 5, 30, 20]]


def test_an_object_may_have_strays_and_few_may_be_occluded(tmp_path, caplog):
    others = [(k, 6 * k, 6 * k + 4, 2, 8) for k in range(2, 7)]
    with caplog.at_level(logging.WARNING, logger="vitrail"):
        numbered(tmp_path / "a", (1, 5, 20, 10, 30), (1, 40, 41, 60, 61), *others)
        assert caplog.text == ""
        boxes = numbered(tmp_path / "b", (1, 5, 20, 10, 30), (1, 5, 20, 40, 60), *others)
    assert boxes[0] == [10, 5, 60, 20]
    assert "4 of 24 objects in the masks of" in caplog.text


def photographed(make: Callable[[Path], Path], pattern: str, orientation: int) -> Callable[[Path], Path]:
    """A data set whose first image has an EXIF orientation."""

    def made(root: Path) -> Path:
        source = make(root)
        (path,) = root.glob(pattern)
        exif = Image.Exif()
        exif[274] = orientation
        Image.open(path).save(path, exif=exif)
        return source

    return made


UNCLEAR = {
    "VOC, by 180°": photographed(voc, "JPEGImages/0.png", 3),
    "COCO, mirrored": photographed(coco, "**/0.png", 2),
    "YOLO, by 90°": photographed(yolo, "images/train/0.png", 6),
    "a table, by 90°": photographed(table, "0.png", 8),
}


@pytest.mark.parametrize("case", UNCLEAR)
def test_boxes_of_photographs_are_taken_as_displayed_with_a_warning(case, tmp_path, caplog):
    root = UNCLEAR[case](tmp_path / "data")
    with caplog.at_level(logging.WARNING, logger="vitrail"):
        open_data(root)
    assert caplog.text.count("1 image has an EXIF orientation") == 1
    assert "whether its boxes lie on the stored pixels" in caplog.text
    found = [finding for finding in check(root, out=tmp_path / "out").findings if finding.kind == "turned"]
    assert len(found) == 1
    assert found[0].files[0].endswith("0.png")


REPAIRED = {
    "no area": (objects(("disc", (5, 5, 5, 9))), "1 without area left out", "box_empty", 2),
    "outside": (objects(("disc", (70, 5, 90, 9))), "1 outside the image left out", "box_outside", 2),
    "swapped corners": (objects(("disc", (29, 29, 5, 6))), "1 with swapped corners repaired", "box_swapped", 3),
    "beyond the border": (objects(("disc", (29, 29, 80, 90))), "1 cut off at the border", "box_border", 3),
    "twice": (objects(("disc", (1, 1, 9, 9))), "1 listed twice counted once", "box_twice", 2),
}


@pytest.mark.parametrize("case", REPAIRED)
def test_bad_boxes_are_repaired_with_one_sentence_and_found_by_check(case, tmp_path, caplog):
    make, message, kind, boxes = REPAIRED[case]
    root = make(tmp_path / "data")
    with caplog.at_level(logging.WARNING, logger="vitrail"):
        data = open_data(root)
    assert message in caplog.text
    (first,) = [
        split.targets[i] for split in data.splits.values() for i in range(len(split)) if Path(split.name(i)).stem == "0"
    ]
    assert len(first) == boxes
    assert (first[:, 3:5] <= (SIZE[1], SIZE[0])).all()
    assert (first[:, 3:5] > first[:, 1:3]).all()
    found = [finding.kind for finding in check(root, out=tmp_path / "out").findings]
    assert found.count(kind) == 1
    assert "box_rare" in found
