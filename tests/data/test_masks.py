"""Images with masks: the layouts people have, the values of all masks, and data sets that are refused or repaired."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from boxes_made import SIZE, voc
from PIL import Image, ImageOps
from segmented import coco, folder, labelme, pairs, picture, save, turned

from vitrail.data import open_data
from vitrail.data.audit import audit
from vitrail.data.masks.raw import COLOUR, DrawnMask, MaskFile, Shape, decode_runs
from vitrail.errors import UserError

RED, BLUE = (255, 0, 0), (0, 0, 255)


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VITRAIL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def labels(root: Path, split: str = "train", **how) -> tuple[tuple[str, ...], np.ndarray]:
    """The classes, and the labels of the first image."""
    data = open_data(root, **how)
    return data.classes, data.splits[split].targets[0].labels()


def expected() -> np.ndarray:
    return picture(np.random.default_rng(1))[1].astype(int)


# Layouts ----------------------------------------------------------------------------------------------------


def test_two_folders_with_the_same_names_or_a_suffix(tmp_path):
    for i, (images, masks, suffix) in enumerate(
        [("images", "masks", ""), ("img", "labels", "_mask"), ("image", "gt", "_gt")]
    ):
        classes, found = labels(pairs(tmp_path / str(i), images, masks, suffix=suffix), val_fraction=0.3)
        assert classes == ("class 0", "class 1", "class 2")
        assert set(np.unique(found)) <= {0, 1, 2}


def test_splits_inside_and_outside_of_the_folders(tmp_path):
    inside = folder(tmp_path / "a", 6, 3)
    outside = tmp_path / "b"
    for split in ("train", "val"):
        pairs(outside / split, "images", "masks", 4)
    assert {s: len(p) for s, p in open_data(inside).splits.items()} == {"train": 6, "val": 3}
    assert {s: len(p) for s, p in open_data(outside).splits.items()} == {"train": 4, "val": 4}
    assert open_data(inside).classes == ("ground", "disc", "square")  # of classes.txt


def test_voc_reads_the_indices_of_a_palette_and_its_lists(tmp_path):
    palette = tuple(range(256)) * 3

    def indexed(mask):
        found = mask.copy()
        found[0] = 255  # the border between objects
        return found

    rng = np.random.default_rng(1)
    for i in range(5):
        image, mask = picture(rng)
        save(tmp_path / "JPEGImages" / f"{i}.jpg", image)
        save(tmp_path / "SegmentationClass" / f"{i}.png", indexed(mask), palette)
    lists = tmp_path / "ImageSets" / "Segmentation"
    lists.mkdir(parents=True)
    (lists / "train.txt").write_text("0\n1\n2\n")
    (lists / "val.txt").write_text("3\n4\n")
    (lists / "trainval.txt").write_text("0\n1\n2\n3\n4\n")
    classes, found = labels(tmp_path)
    assert classes == ("background", "aeroplane", "bicycle")
    assert (found[0] == -1).all()
    assert np.array_equal(found[1:], expected()[1:])


def test_cvats_colours_are_named_by_its_label_map(tmp_path):
    colours = np.array([(0, 0, 0), RED, BLUE], np.uint8)
    pairs(tmp_path, "JPEGImages", "SegmentationClass", value=lambda m: colours[m])
    (tmp_path / "labelmap.txt").write_text(
        "# label:color_rgb:parts:actions\nbackground:0,0,0::\ncar:255,0,0::\nsky:0,0,255::\n"
    )
    classes, found = labels(tmp_path, val_fraction=0.3)
    assert classes == ("background", "car", "sky")
    assert found.max() == 2


def test_ade20k_leaves_out_0(tmp_path):
    for split in ("training", "validation"):
        pairs(tmp_path, f"images/{split}", f"annotations/{split}", 4)
    (tmp_path / "objectInfo150.txt").write_text(
        "Idx\tRatio\tTrain\tVal\tName\n1\t0.1\t1\t1\twall, side\n2\t0.1\t1\t1\tbuilding\n"
    )
    classes, found = labels(tmp_path)
    assert classes == ("wall", "building")
    assert np.array_equal(found, expected() - 1)


@pytest.mark.parametrize("ids", ["labelTrainIds", "labelIds"])
def test_cityscapes_has_19_classes_however_they_are_numbered(tmp_path, ids):
    values = np.array([0, 13, 255] if ids == "labelTrainIds" else [7, 26, 4], np.uint8)
    rng = np.random.default_rng(1)
    for split in ("train", "val"):
        for i in range(3):
            image, mask = picture(rng)
            save(tmp_path / "leftImg8bit" / split / "ulm" / f"ulm_{i}_leftImg8bit.png", image)
            save(tmp_path / "gtFine" / split / "ulm" / f"ulm_{i}_gtFine_{ids}.png", values[mask])
    classes, found = labels(tmp_path)
    assert classes == ("road", "car")
    assert set(np.unique(found)) == {-1, 0, 1}


def test_camvid_has_a_folder_of_masks_beside_each_split(tmp_path):
    for split in ("train", "val"):
        pairs(tmp_path, split, f"{split}annot", 4, value=lambda m: np.array([0, 8, 11], np.uint8)[m])
    classes, found = labels(tmp_path)
    assert classes == ("sky", "car")
    assert (found[expected() == 2] == -1).all()


def test_labelme_draws_polygons_with_later_ones_on_top(tmp_path):
    classes, found = labels(labelme(tmp_path), val_fraction=0.3)
    assert classes == ("background", "bird", "tree")
    assert (found[6:12, 6:12] == 2).all()
    assert (found[13:15, 13:15] == 1).all()
    assert ((found == 1).sum(), (found == 2).sum()) == (13 * 6, 10 * 10 - 3 * 3)


def test_coco_draws_polygons_and_run_lengths_and_ids_may_have_holes(tmp_path):
    classes, found = labels(coco(tmp_path), task="masks", val_fraction=0.3)
    assert classes == ("background", "cat", "dog")
    assert (found[3:11, 3:11] == 2).all()
    assert np.flatnonzero(found.T.ravel() == 1).tolist() == [400, 401, 402, 403, 404]


@pytest.mark.parametrize("images", ["train2017", "images/train2017", "images/train", "images", "annotations"])
def test_cocos_own_layout_and_a_single_json_file(tmp_path, images):
    coco(tmp_path)
    (tmp_path / "annotations").mkdir()
    file = (tmp_path / "annotations.json").rename(tmp_path / "annotations" / "instances_train2017.json")
    (tmp_path / "annotations" / "captions_train2017.json").write_text('{"images": [], "annotations": []}')
    (tmp_path / "images").rename(tmp_path / "moved")
    for path in (tmp_path / "moved").iterdir():
        (tmp_path / images).mkdir(parents=True, exist_ok=True)
        path.rename(tmp_path / images / path.name)
    for source in (tmp_path, file):
        classes, found = labels(source, task="masks", val_fraction=0.3)
        assert classes == ("background", "cat", "dog")
        assert (found[3:11, 3:11] == 2).all()
    assert not audit(file, task="masks").errors


def test_labelmes_images_without_a_file_are_left_out_with_a_warning(tmp_path, caplog):
    labelme(tmp_path, 8)
    for i in range(3):
        (tmp_path / f"{i}.json").unlink()
    with caplog.at_level("WARNING", logger="vitrail"):
        assert sum(map(len, open_data(tmp_path).splits.values())) == 5
    assert "3 of 8 images" in caplog.text
    assert "have no JSON file and are left out: 0.jpg, 1.jpg" in caplog.text


def rows_of(*pairs: tuple[np.ndarray, np.ndarray], exif: int = 1):
    """A Hugging Face set of images and masks."""
    datasets = pytest.importorskip("datasets")
    photographs = []
    for image, _ in pairs:
        stream = io.BytesIO()
        Image.fromarray(image).save(stream, "JPEG", exif=turned(exif))
        photographs.append({"bytes": stream.getvalue(), "path": None})
    columns = {"image": photographs, "mask": [Image.fromarray(mask) for _, mask in pairs]}
    features = datasets.Features({"image": datasets.Image(), "mask": datasets.Image()})
    return datasets.Dataset.from_dict(columns, features=features)


def test_a_mask_column_of_a_hugging_face_set(tmp_path):
    rng = np.random.default_rng(1)
    made = [picture(rng) for _ in range(6)]
    rows = rows_of(*((image, 255 * (mask > 0).astype(np.uint8)) for image, mask in made))
    rows.save_to_disk(tmp_path / "set")
    assert not audit(tmp_path / "set", mask_values=("0=ground", "255=object")).errors
    with pytest.raises(UserError, match="0=ground,255=object"):
        open_data(tmp_path / "set")
    for source in (tmp_path / "set", rows):
        classes, found = labels(source, mask_values=("0=ground", "255=object"), val_fraction=0.3)
        assert classes == ("ground", "object")
        assert np.array_equal(found, expected() > 0)


@pytest.mark.parametrize("scale", [0.5, 2])
def test_a_mask_column_must_have_the_size_of_the_images(scale):
    rng = np.random.default_rng(1)
    made = [picture(rng) for _ in range(6)]
    size = int(40 * scale), int(32 * scale)
    small = [(image, np.asarray(Image.fromarray(mask).resize(size, 0))) for image, mask in made]
    with pytest.raises(UserError, match=r"must have the size of their images, but .* and its image 32x40"):
        open_data(rows_of(*small), val_fraction=0.3)
    _, found = labels(rows_of(*made, exif=6), val_fraction=0.3)
    assert np.array_equal(found, np.rot90(expected(), -1))


def test_run_lengths_are_pycocotools():
    coco_mask = pytest.importorskip("pycocotools.mask")
    mask = np.random.default_rng(0).random((13, 9)) < 0.4
    packed = coco_mask.encode(np.asfortranarray(mask.astype(np.uint8)))
    assert np.array_equal(decode_runs(packed["counts"], (13, 9)), mask)
    assert DrawnMask("x", (13, 9), (Shape(5, runs=packed["counts"]),)).values().max() == 5


# Values -----------------------------------------------------------------------------------------------------


def test_values_are_named(tmp_path):
    root = pairs(tmp_path, "images", "masks", value=lambda m: np.array([0, 255, 255], np.uint8)[m])
    classes, found = labels(root, mask_values=("0=ground", "255=object"), val_fraction=0.3)
    assert classes == ("ground", "object")
    assert np.array_equal(found, expected() > 0)


def test_instances_become_one_class_and_others_are_ignored(tmp_path):
    root = pairs(tmp_path, "images", "masks", value=lambda m: m.astype(np.uint16) * 300)
    _, found = labels(root, mask_values=("0=ground", "*=nucleus"), val_fraction=0.3)
    assert np.array_equal(found, expected() > 0)
    _, found = labels(root, mask_values=("0=ground", "300=disc", "*=ignore"), val_fraction=0.3)
    assert np.array_equal(found, np.where(expected() == 2, -1, expected()))


def test_a_few_numbers_of_objects_are_not_taken_for_classes(tmp_path):
    for i in range(6):
        split = ("val", "train")[i % 2]
        save(tmp_path / "images" / split / f"{i}.png", np.zeros((4, 4, 3), np.uint8))
        save(tmp_path / "masks" / split / f"{i}.png", np.arange(16, dtype=np.uint8).reshape(4, 4) % (5 + 2 * i))
    with pytest.raises(UserError, match="look like one number per object"):
        open_data(tmp_path)
    save(tmp_path / "masks" / "val" / "0.png", np.full((4, 4), 7, np.uint8))  # with a gap: classes
    assert len(open_data(tmp_path).classes) == 15


def test_colours_are_named_by_their_hexadecimal(tmp_path):
    colours = np.array([(9, 9, 9), RED, BLUE], np.uint8)
    root = pairs(tmp_path, "images", "masks", value=lambda m: colours[m])
    _, found = labels(root, mask_values=("#090909=ground", "#ff0000=a", "#0000ff=b"), val_fraction=0.3)
    assert np.array_equal(found, expected())
    blank = save(tmp_path / "blank.png", np.full((4, 4, 3), 9, np.uint8))
    assert set(np.unique(MaskFile(blank).values())) == {9}
    assert MaskFile(tmp_path / "masks" / "0.png").values().max() >= COLOUR


def photographs(root: Path, orientation: int, size: tuple[int, int] = (32, 40), end: str = ".png") -> Path:
    """Photographs with an EXIF orientation, and masks of their stored pixels."""
    rng = np.random.default_rng(1)
    for i in range(6):
        image, mask = picture(rng, size)
        save(root / "masks" / f"{i}.png", mask)
        if end == ".npy":
            np.save(root / "masks" / f"{i}.npy", mask)
            (root / "masks" / f"{i}.png").unlink()
        (root / "images").mkdir(exist_ok=True)
        Image.fromarray(image).save(root / "images" / f"{i}.jpg", exif=turned(orientation))
    return root


@pytest.mark.parametrize("end", [".png", ".npy"])
@pytest.mark.parametrize("orientation", [5, 6, 7, 8])
def test_a_rotated_photograph_turns_its_mask(tmp_path, caplog, orientation, end):
    data = open_data(photographs(tmp_path, orientation, end=end), val_fraction=0.3)
    upright = ImageOps.exif_transpose(with_exif(expected(), orientation))
    found = data.splits["train"].targets[0].labels()
    assert found.shape == data.splits["train"].image(0).shape[:2]
    assert np.array_equal(found, np.asarray(upright))
    assert "nothing shows" not in caplog.text


def test_polygons_on_the_stored_pixels_of_a_photograph_are_rotated_too(tmp_path):
    _, upright = labels(coco(tmp_path / "a"), task="masks", val_fraction=0.3)
    for path in (coco(tmp_path / "b") / "images").iterdir():
        Image.open(path).save(path, exif=turned(8))
    _, found = labels(tmp_path / "b", task="masks", val_fraction=0.3)
    assert np.array_equal(found, np.rot90(upright))


def with_exif(values: np.ndarray, orientation: int) -> Image.Image:
    image = Image.fromarray(values.astype(np.uint8))
    image.getexif()[274] = orientation
    return image


@pytest.mark.parametrize(("orientation", "size"), [(2, (32, 40)), (3, (32, 40)), (4, (32, 40)), (6, (32, 32))])
def test_masks_of_photographs_that_keep_their_size_are_taken_as_displayed_with_a_warning(
    tmp_path, caplog, orientation, size
):
    root = photographs(tmp_path, orientation, size)
    with caplog.at_level("WARNING", logger="vitrail"):
        data = open_data(root, val_fraction=0.3)
    assert caplog.text.count("6 images have an EXIF orientation") == 1
    assert "whether their masks lie on the stored pixels" in caplog.text
    mask = np.asarray(Image.open(root / "masks" / f"{Path(data.splits['train'].name(0)).stem}.png"))
    assert np.array_equal(data.splits["train"].targets[0].labels(), mask)
    found = [finding for finding in audit(root).findings if finding.kind == "turned"]
    assert [finding.detail for finding in found] == [f"EXIF orientation {orientation}"] * 6
    assert found[0].severity == "note"


def test_a_model_with_other_classes_first_renumbers(tmp_path):
    data = open_data(folder(tmp_path, 6, 3))
    model = type(data.task)(("sky", "square", "ground", "disc"))
    other = open_data(tmp_path, model=model)
    before, after = (d.splits["val"].targets[0] for d in (data, other))
    assert np.array_equal(np.array([2, 3, 1])[before.labels()], after.labels())
    assert after.counts.tolist() == [0, *before.counts[[2, 0, 1]].tolist()]


def test_validation_data_may_lack_the_last_class(tmp_path):
    root = pairs(tmp_path / "train", "images", "masks")
    other = pairs(tmp_path / "val", "images", "masks", 4, value=lambda m: m % 2)
    data = open_data(root, val=other)
    val = data.splits["val"].targets
    assert data.classes == ("class 0", "class 1", "class 2")
    assert data.task.counts(val).tolist() == [4, 4, 0]
    assert [labels for _, labels in data.task.describe(val)] == [("class 0", "class 1")] * 4


def test_a_folder_with_masks_and_boxes_has_the_masks_and_says_how_to_get_the_boxes(tmp_path, caplog):
    voc(tmp_path)
    for i in range(6):
        mask = np.zeros(SIZE, np.uint8)
        mask[6:22, 4:20], mask[10:40, 30:60] = 1, 2
        save(tmp_path / "SegmentationClass" / f"{i}.png", mask)
    with caplog.at_level("INFO", logger="vitrail"):
        assert open_data(tmp_path).task.name == "masks"
        assert caplog.text.count("has masks and boxes: using the masks. Use --task boxes for the boxes.") == 1
        caplog.clear()
        assert open_data(tmp_path, task="boxes").classes == ("disc", "square")
        assert open_data(tmp_path, task="masks").task.name == "masks"
        assert "masks and boxes" not in caplog.text


def test_check_says_what_the_masks_are(tmp_path):
    found = audit(folder(tmp_path, 6, 3))
    kinds = {finding.kind: finding for finding in found.findings}
    assert "ground" in kinds["pixels"].detail
    assert "%" in kinds["pixels"].detail
    assert not found.errors
    wrong = audit(pairs(tmp_path / "w", "images", "masks", value=lambda m: np.array([0, 255, 255], np.uint8)[m]))
    assert wrong.errors == 1
    assert "--mask-values 0=ground,255=object" in wrong.findings[0].detail
