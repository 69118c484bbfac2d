"""Data sets with masks that are refused, each with one sentence, or repaired."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from segmented import coco, folder, labelme, pairs, picture, save

from vitrail.data import open_data
from vitrail.errors import UserError

RED, BLUE = (255, 0, 0), (0, 0, 255)


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VITRAIL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def plain(root: Path, **how) -> Path:
    return pairs(root, "images", "masks", **how)


def drop(pattern: str, keep: int = 0) -> Callable[[Path], Path]:
    def make(root: Path) -> Path:
        plain(root)
        for path in sorted(root.glob(pattern))[keep:]:
            path.unlink()
        return root

    return make


def rewrite(change: Callable[[Path], object], pattern: str = "masks/*.png") -> Callable[[Path], Path]:
    def make(root: Path) -> Path:
        plain(root)
        for path in sorted(root.glob(pattern)):
            change(path)
        return root

    return make


def with_file(name: str, text: str, make: Callable[[Path], Path] = plain) -> Callable[[Path], Path]:
    def made(root: Path) -> Path:
        make(root)
        (root / name).write_text(text)
        return root

    return made


def _voc_without_images(root: Path) -> Path:
    return pairs(root, "other", "SegmentationClass")


def _voc_list(root: Path) -> Path:
    pairs(root, "JPEGImages", "SegmentationClass")
    (root / "ImageSets" / "Segmentation").mkdir(parents=True)
    (root / "ImageSets" / "Segmentation" / "train.txt").write_text("0\n77\n")
    return root


def _cvat(text: str) -> Callable[[Path], Path]:
    colours = np.array([(0, 0, 0), RED, BLUE], np.uint8)

    def make(root: Path) -> Path:
        pairs(root, "JPEGImages", "SegmentationClass", value=lambda m: colours[m])
        (root / "labelmap.txt").write_text(text)
        return root

    return make


def _split_without_masks(root: Path) -> Path:
    folder(root, 4, 2)
    (root / "masks" / "val").rename(root / "masks" / "other")
    return root


def _two_masks(root: Path) -> Path:
    plain(root)
    Image.open(root / "masks" / "0.png").save(root / "masks" / "0.bmp")
    return root


def _class_only_in_val(root: Path) -> Path:
    folder(root, 4, 3)
    for path in (root / "masks" / "train").iterdir():
        save(path, np.asarray(Image.open(path)) % 2)
    return root


def _smooth(path: Path) -> None:
    image = Image.open(path).convert("RGB").point(lambda v: 120 * v)
    coloured = np.asarray(image).copy()
    coloured[..., 0] = np.random.default_rng(0).integers(0, 255, coloured.shape[:2])
    Image.fromarray(coloured).save(path)


def discs(*values: int, count: int = 6) -> Callable[[Path], Path]:
    """Two objects of each value, far from each other."""

    def value(mask: np.ndarray) -> np.ndarray:
        found = np.zeros_like(mask)
        for i, number in enumerate(values):
            found[6 * i : 6 * i + 4, 2:8] = found[6 * i : 6 * i + 4, 20:26] = number
        return found

    return lambda root: pairs(root, "images", "masks", count, value=value)


BOXES = {"task": "boxes"}
VALUES = {"mask_values": ("0=a", "1=b", "2=c")}
BAD: dict[str, tuple[Callable[[Path], Path], dict, str]] = {
    "0 and 255": (lambda r: plain(r, value=lambda m: 255 * (m > 0).astype(np.uint8)), {}, "0=ground,255=object"),
    "colours": (
        lambda r: plain(r, value=lambda m: np.array([(0, 0, 0), RED, BLUE], np.uint8)[m]),
        {},
        "are colours, not",
    ),
    "many colours": (rewrite(_smooth), {}, "one exact colour or value per class"),
    "instances": (
        lambda r: plain(r, value=lambda m: np.arange(m.size, dtype=np.uint16).reshape(m.shape) // 9),
        {},
        "one number per object",
    ),
    "strange values": (
        lambda r: plain(r, value=lambda m: (np.arange(m.size, dtype=np.uint16).reshape(m.shape) * 41) % 60_000),
        {},
        "cannot be class indices",
    ),
    "one value": (lambda r: plain(r, value=lambda m: 0 * m), {}, "have the value 0. Segmentation needs"),
    "jpeg masks": (lambda r: plain(r, end=".jpg"), {}, "whose compression changes values"),
    "no masks": (drop("masks/*.png"), {"task": "masks"}, "has no masks: there must be a folder"),
    "few masks": (drop("masks/*.png", 2), {}, "4 of 6 images .* have no mask"),
    "no images": (drop("images/*.jpg"), {}, "has no images"),
    "other size": (rewrite(lambda p: Image.open(p).resize((10, 10)).save(p)), {}, "must have the size of their images"),
    "damaged masks": (rewrite(lambda p: p.write_bytes(p.read_bytes()[:40])), {}, "cannot be read"),
    "text as masks": (rewrite(lambda p: p.write_text("no")), {}, "not an image"),
    "too few names": (with_file("classes.txt", "a\nb\n"), {}, "No class for the mask value 2"),
    "a name twice": (with_file("classes.txt", "a\nb\na\n"), {}, "names 'a' twice"),
    "a split without masks": (_split_without_masks, {}, "'val', but .* has none"),
    "two masks of an image": (_two_masks, {}, "are masks of one image"),
    "a class only in val": (_class_only_in_val, {}, "is in the val split .* not in train"),
    "VOC without images": (_voc_without_images, {}, "no JPEGImages"),
    "a VOC list of more": (_voc_list, {}, "lists '77', which has no image or mask"),
    "a label map line": (_cvat("car=red\n"), {}, "Line 1 of .* must be name:R,G,B"),
    "a label map colour twice": (_cvat("a:0,0,0::\nb:0,0,0::\n"), {}, "the same colour"),
    "a label map too short": (_cvat("a:0,0,0::\nb:255,0,0::\n"), {}, "No class for the mask value #0000ff"),
    "LabelMe: a line": (lambda r: labelme(r, points=[[1, 1], [2, 2]], shape_type="line"), {}, "is a line of 2 points"),
    "LabelMe: no image": (
        lambda r: (drop_images := labelme(r)) and [p.unlink() for p in sorted(r.glob("*.jpg"))[1:]] and drop_images,
        {},
        "has no image",
    ),
    "LabelMe: few files": (
        lambda r: (made := labelme(r)) and [p.unlink() for p in sorted(r.glob("*.json"))[2:]] and made,
        {},
        "4 of 6 images in .* have no JSON file, such as 2.jpg",
    ),
    "COCO: no images": (
        lambda r: (made := coco(r)) and [p.unlink() for p in r.glob("images/*")] and made,
        {"task": "masks"},
        "lists '0.jpg', which does not exist",
    ),
    "COCO: only boxes": (lambda r: coco(r, segmentation=[]), {"task": "masks"}, "only a box. Use --task boxes"),
    "COCO: unknown category": (lambda r: coco(r, category_id=99), {"task": "masks"}, "has the category 99"),
    "COCO: run lengths": (
        lambda r: coco(r, segmentation={"counts": [3, 4]}),
        {"task": "masks"},
        "run lengths of 7 pixels",
    ),
    "boxes of 0 and 255": (discs(255), BOXES, "have the values 0 and 255, but --task boxes needs one number per"),
    "boxes of one class": (discs(1), BOXES, "look like class indices: 6 of 6 values are in several separate regions"),
    "boxes of classes": (discs(1, 2, 5), BOXES, "look like class indices: 18 of 18 values"),
    "boxes of named classes": (with_file("classes.txt", "a\nb\nc\n"), BOXES, "have one value per class, as in .*"),
    "boxes of LabelMe": (labelme, BOXES, "have one value per class, as in LabelMe, but --task boxes"),
    "mask values: no class": (plain, {"mask_values": ("0", "1=b")}, "as in 0=ground"),
    "mask values: not a value": (plain, {"mask_values": ("zero=a", "1=b")}, "a number, a colour like #ff0000"),
    "mask values: twice": (plain, {"mask_values": ("0=a", "0=b")}, "has the value 0 twice"),
    "mask values: one class": (plain, {"mask_values": ("0=a", "1=ignore")}, "at least two classes"),
    "mask values: missing": (plain, {"mask_values": ("0=a", "1=b")}, "Add it to --mask-values"),
    "mask values: a class unseen": (plain, {"mask_values": ("0=a", "1=b", "2=ignore", "*=c")}, None),
    "mask values of classes": (
        lambda r: (
            [save(r / c / f"{i}.png", picture(np.random.default_rng(i))[0]) for c in "ab" for i in range(4)] and r
        ),
        VALUES,
        "but .* has none",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_data_set_is_refused_with_one_sentence(case, tmp_path):
    make, how, message = BAD[case]
    root = make(tmp_path)
    if message is None:
        assert open_data(root, **how).classes == ("a", "b", "c")
        return
    with pytest.raises(UserError, match=message) as raised:
        open_data(root, **how)
    assert len(str(raised.value).replace(str(tmp_path), "")) < 600
