"""`check` finds every fault that was planted, and none where there is none."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageEnhance

import vitrail
from vitrail.data.audit.findings import Audit
from vitrail.data.audit.near_duplicates import near_pairs, signatures
from vitrail.data.images import survey_image
from vitrail.errors import UserError
from vitrail.verbs.check import check


def scene(seed: int, size: tuple[int, int] = (96, 120)) -> Image.Image:
    """A picture like no other: soft colours with some detail, as in a photograph."""
    rng = np.random.default_rng(seed)
    layers = []
    for cells, strength in ((3, 1.0), (6, 0.6), (24, 0.25)):
        small = Image.fromarray(rng.integers(0, 256, (cells, cells, 3), np.uint8))
        layers.append(strength * np.asarray(small.resize(size[::-1], Image.Resampling.BICUBIC), np.float32))
    return Image.fromarray((sum(layers) / 1.85).astype(np.uint8))


def put(path: Path, image: Image.Image, **settings: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **settings)
    return path


def clean(folder: Path, train: int = 8, val: int = 3) -> Path:
    """Two classes of different pictures in two splits."""
    seed = 0
    for split, count in (("train", train), ("val", val)):
        for label in ("cat", "dog"):
            for i in range(count):
                put(folder / split / label / f"{i}.jpg", scene(seed), quality=90)
                seed += 1
    return folder


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def folder() -> Path:
    return clean(Path("photos"))


def found(audit: Audit, kind: str) -> list[tuple[str, ...]]:
    return [tuple(n.removeprefix(audit.root) for n in f.files) for f in audit.findings if f.kind == kind]


def kinds(audit: Audit) -> dict[str, str]:
    return {finding.kind: finding.severity for finding in audit.findings}


def test_a_clean_folder_has_no_findings_and_nothing_is_written(folder):
    audit = check(folder)
    assert audit.findings == ()
    assert audit.sheet is None
    assert audit.counts == {"cat": {"train": 8, "val": 3}, "dog": {"train": 8, "val": 3}}
    assert audit.sizes == dict.fromkeys(("smallest", "median", "largest"), (96, 120))
    assert audit.modes == {"colour": 22}
    assert "No problems found" in audit.table()
    assert [path.name for path in Path().iterdir()] == ["photos"]


def test_unreadable_files_are_named_with_the_reason(folder):
    whole = (folder / "train/cat/0.jpg").read_bytes()
    (folder / "train/cat/cut.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "train/dog/zero.jpg").write_bytes(b"")
    (folder / "val/dog/text.png").write_text("no image at all")
    audit = check(folder)
    assert {f.files[0]: (f.detail, f.severity) for f in audit.findings if f.kind == "unreadable"} == {
        "photos/train/cat/cut.jpg": ("truncated", "error"),
        "photos/train/dog/zero.jpg": ("empty file", "error"),
        "photos/val/dog/text.png": ("not an image", "error"),
    }
    assert kinds(audit) == {"unreadable": "error"}


def test_wrong_extensions_are_noted_whether_the_file_is_used_or_skipped(folder):
    put(folder / "train/cat/really.jpg", scene(100), format="PNG")
    put(folder / "train/dog/skipped.txt", scene(101), format="JPEG")
    put(folder / "train/dog/right.jpeg", scene(102))
    (folder / "train/dog/notes.txt").write_text("the light was bad that day")
    audit = check(folder)
    assert sorted(found(audit, "extension")) == [("train/cat/really.jpg",), ("train/dog/skipped.txt",)]
    assert kinds(audit) == {"extension": "note"}
    assert audit.images == 24


def test_the_same_file_in_two_splits_is_an_error_and_within_one_a_note(folder):
    shutil.copy(folder / "train/cat/1.jpg", folder / "val/cat/again.jpg")
    shutil.copy(folder / "train/dog/2.jpg", folder / "train/dog/copy.jpg")
    audit = check(folder)
    assert found(audit, "leak") == [("train/cat/1.jpg", "val/cat/again.jpg")]
    assert found(audit, "duplicate") == [("train/dog/2.jpg", "train/dog/copy.jpg")]
    assert kinds(audit) == {"leak": "error", "duplicate": "note"}


def test_the_same_file_in_two_classes_is_an_error(folder):
    shutil.copy(folder / "train/cat/1.jpg", folder / "train/dog/also.jpg")
    audit = check(folder)
    assert found(audit, "conflict") == [("train/cat/1.jpg", "train/dog/also.jpg")]
    assert kinds(audit)["conflict"] == "error"


CHANGES = {
    "re-encoded": lambda image: image,
    "smaller": lambda image: image.resize((round(image.width * 0.8), round(image.height * 0.8))),
    "brighter": lambda image: ImageEnhance.Brightness(image).enhance(1.15),
    "grey": lambda image: image.convert("L"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_copy_is_found_within_a_split_and_across(folder, change):
    for source, copy in (("train/cat/3.jpg", "train/cat/copy.jpg"), ("train/dog/4.jpg", "val/dog/copy.jpg")):
        with Image.open(folder / source) as image:
            put(folder / copy, CHANGES[change](image), quality=60)
    audit = check(folder)
    assert found(audit, "near") == [("train/cat/3.jpg", "train/cat/copy.jpg")]
    assert found(audit, "leak") == [("train/dog/4.jpg", "val/dog/copy.jpg")]
    assert kinds(audit) == {"near": "note", "leak": "error"}


def test_a_copy_that_was_turned_upright_is_found_by_what_a_person_sees(folder):
    with Image.open(folder / "train/cat/0.jpg") as image:
        exif = Image.Exif()
        exif[0x0112] = 6
        put(folder / "val/cat/turned.jpg", image.transpose(Image.Transpose.ROTATE_90), exif=exif)
    assert found(check(folder), "leak") == [("train/cat/0.jpg", "val/cat/turned.jpg")]


def test_different_pictures_are_far_from_near():
    thumbnails = np.stack([np.asarray(scene(i, (16, 16)).convert("L")) for i in range(400)])
    assert list(near_pairs(signatures(thumbnails), ["train"] * 200 + ["val"] * 200)) == []


def test_many_pictures_of_nothing_and_many_alike_do_not_multiply(folder):
    for i in range(30):
        put(folder / f"train/cat/blank{i}.png", Image.new("L", (64, 64 + i), 200))
        put(folder / f"train/dog/alike{i}.jpg", scene(500), quality=60 + i)
    audit = check(folder)
    assert len(found(audit, "blank")) == 30
    assert len(found(audit, "near")) == 29
    assert audit.errors == 0


def test_a_class_fifty_times_larger_is_an_error_and_four_times_a_note(tmp_path):
    for i in range(50):
        put(tmp_path / f"uneven/cat/{i}.png", scene(i, (24, 24)))
    for i in range(4):
        put(tmp_path / f"some/cat/{i}.png", scene(i, (24, 24)))
    put(tmp_path / "uneven/dog/1.png", scene(1000, (24, 24)))
    put(tmp_path / "some/dog/1.png", scene(1000, (24, 24)))
    assert kinds(check(tmp_path / "uneven")) == {"imbalance": "error", "few": "note"}
    assert kinds(check(tmp_path / "some")) == {"imbalance": "note", "few": "note"}


def test_classes_that_train_lacks_and_odd_sizes(folder):
    put(folder / "val/horse/1.png", scene(200))
    put(folder / "train/cat/tiny.png", scene(201, (10, 12)))
    put(folder / "train/cat/long.png", scene(202, (96, 900)))
    audit = check(folder)
    assert [f.detail for f in audit.findings if f.kind == "class"] == ["'horse' is in val but not in train"]
    assert found(audit, "size") == [("train/cat/tiny.png",), ("train/cat/long.png",)]
    assert kinds(audit) == {"class": "error", "size": "note"}


def test_folders_that_cannot_be_opened_are_reported_and_not_refused(tmp_path):
    put(tmp_path / "loose/1.png", scene(1))
    put(tmp_path / "twice/val/cat/1.png", scene(1))
    put(tmp_path / "twice/valid/cat/1.png", scene(1))
    put(tmp_path / "empty/cat/1.png", scene(1))
    (tmp_path / "empty/dog").mkdir()
    for name, words in (("loose", "no class folders"), ("twice", "two val splits"), ("empty", "has no images")):
        audit = check(tmp_path / name)
        assert kinds(audit)["layout"] == "error"
        assert words in audit.table()


def test_images_beside_the_classes_are_noted(folder):
    put(folder / "train/lost.png", scene(300))
    audit = check(folder)
    assert found(audit, "loose") == [("train/lost.png",)]
    assert kinds(audit) == {"loose": "note"}


def test_arrays_are_checked_as_files_are(tmp_path):
    x = np.stack([np.asarray(scene(i, (16, 16))) for i in range(20)])
    x_val = np.stack([x[3], *(np.asarray(scene(100 + i, (16, 16))) for i in range(3))])
    np.savez(tmp_path / "set.npz", x_train=x, y_train=np.arange(20) % 2, x_val=x_val, y_val=np.array([1, 0, 1, 0]))
    audit = check(tmp_path / "set.npz")
    assert found(audit, "leak") == [("set/train/3", "set/val/0")]
    assert audit.counts == {"0": {"train": 10, "val": 2}, "1": {"train": 10, "val": 2}}


def test_copies_in_arrays_without_splits_are_in_no_two_splits(tmp_path):
    x = np.stack([np.asarray(scene(i % 19, (16, 16))) for i in range(38)])
    np.savez(tmp_path / "set.npz", images=x, labels=np.arange(38) % 19 % 2)
    audit = check(tmp_path / "set.npz")
    assert len(found(audit, "duplicate")) == 19
    assert kinds(audit) == {"duplicate": "note"}
    assert audit.splits == ("train",)


def test_a_table_is_checked_as_a_folder_is(folder, vitrail_says):
    shutil.copy(folder / "train/cat/1.jpg", folder / "val/cat/again.jpg")
    (folder / "train/dog/2.jpg").write_bytes(b"")
    files = sorted(folder.rglob("*.jpg"))
    rows = [f"{path.relative_to(folder)};{path.parent.name};{path.parent.parent.name};x" for path in files]
    (folder / "list.csv").write_text("\n".join(["shot;animal;split;note", *rows, "train/dog/lost.jpg;dog;train;x"]))
    columns = {"image_column": "shot", "label_column": "animal"}
    audit = check(folder / "list.csv", **columns)
    assert audit.counts == check(folder).counts
    assert found(audit, "leak") == [("train/cat/1.jpg", "val/cat/again.jpg")]
    assert sorted(found(audit, "unreadable")) == [("train/dog/2.jpg",), ("train/dog/lost.jpg",)]
    assert kinds(audit) == {"leak": "error", "unreadable": "error"}

    code, out, _ = vitrail_says("check", folder / "list.csv", "--image-column", "shot", "--label-column", "animal")
    assert code == 1
    assert "train/dog/lost.jpg: no such file or directory" in out
    code, _, err = vitrail_says("check", folder, "--image-column", "shot")
    assert code == 2
    assert "apply to tables" in err


def test_nothing_to_check(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="has no images"):
        check(tmp_path / "empty")
    with pytest.raises(UserError, match="There is no data set 'nowhere'"):
        check("nowhere")
    with pytest.raises(UserError, match="'workers' must be at least 1"):
        check("digits", workers=0)


def test_a_survey_says_what_inspecting_says(tmp_path):
    path = put(tmp_path / "a.jpg", scene(0).transpose(Image.Transpose.ROTATE_90))
    survey, thumbnail = survey_image(path)
    assert (survey.h, survey.w, survey.format, survey.mode) == (120, 96, "JPEG", "RGB")
    assert thumbnail.shape == (16, 16)


# With a model


@pytest.fixture(scope="module")
def judge(tmp_path_factory, plain_runs) -> Path:  # noqa: ARG001
    """A run that knows digits well, in a few seconds."""
    out = tmp_path_factory.mktemp("runs")
    return vitrail.train("digits", out=out, name="judge", model="vit_nano4", img_size=8, stem="patch", epochs=4)


def test_swapped_labels_are_found_by_a_run(digits, judge):
    swapped = Path("swapped")
    shutil.copytree(digits, swapped)
    moved = []
    for label, other in (("0", "1"), ("6", "4"), ("7", "2")):
        for path in sorted((swapped / label).iterdir())[:2]:
            moved.append((f"{other}/{path.name}",))
            path.rename(swapped / other / path.name)
    assert "suspicious" not in kinds(check(swapped))
    audit = check(swapped, run=judge)
    suspects = found(audit, "suspicious")
    assert len(set(moved) & set(suspects)) >= 5
    assert len(suspects) <= 9
    assert kinds(audit)["suspicious"] == "note"
    detail = next(f.detail for f in audit.findings if f.files == (f"swapped/{moved[0][0]}",) and f.kind == "suspicious")
    assert re.fullmatch(r"labelled '1' \(.*%\), the model says '0' \(.*%\)", detail)
    assert len([f for f in check(digits, run=judge).findings if f.kind == "suspicious"]) <= 3


def test_a_run_for_other_classes(folder, judge):
    with pytest.raises(UserError, match="no class in common: the data has cat, dog"):
        check(folder, run=judge)


# The command


def test_exit_codes_and_what_is_printed(vitrail_says, folder):
    code, out, _ = vitrail_says("check", folder)
    assert code == 0
    assert "No problems found" in out

    for i in range(7):
        shutil.copy(folder / f"train/cat/{i}.jpg", folder / f"val/cat/copy{i}.jpg")
    code, out, _ = vitrail_says("check", folder, "--out", "there")
    assert code == 1
    assert "ERROR the same image in two splits: 7" in out
    assert "train/cat/0.jpg = val/cat/copy0.jpg" in out
    assert "and 2 more" in out
    assert "7 findings would harm a training run" in out
    with Image.open("there/check.png") as sheet:
        assert sheet.width > 500

    code, out, err = vitrail_says("check", "nowhere")
    assert (code, out) == (2, "")
    assert err.startswith("vitrail: There is no data set 'nowhere'")


def test_json_is_complete_and_strange_names_survive(vitrail_says):
    for seed, label in ((0, "<script>"), (50, "猫 $5_{x}")):
        for i in range(6):
            put(Path("data", label, f"{i}.png"), scene(seed + i))
        shutil.copy(Path("data", label, "0.png"), Path("data", label, "0 copy.png"))
    code, out, _ = vitrail_says("check", "data", "--json")
    document = json.loads(out)
    assert code == 0
    assert document["counts"] == {"<script>": {"train": 7}, "猫 $5_{x}": {"train": 7}}
    assert document["images"] == 14
    assert [f["files"] for f in document["findings"]] == [
        [f"data/{label}/0 copy.png", f"data/{label}/0.png"] for label in ("<script>", "猫 $5_{x}")
    ]
    assert Path(document["sheet"]).name == "check.png"
    assert Path(document["sheet"]).is_file()


def test_small_pictures_of_like_things_are_no_copies():
    audit = vitrail.check("digits")
    assert not [finding for finding in audit.findings if finding.kind in ("near", "leak")]
