"""Tables open as one `Data`, their columns are found, and every way to get them wrong has its sentence."""

from __future__ import annotations

import csv
import json
import logging
import sys
from pathlib import Path

import pytest
from PIL import Image

import vitrail
from vitrail.data import Data, FileSplit, open_data
from vitrail.data.table import _read_parquet
from vitrail.errors import UserError
from vitrail.tasks import Multiclass

pytestmark = pytest.mark.usefixtures("plain_runs")

ROWS = [("a.png", "cat"), ("b.png", "cat"), ("c.png", "dog"), ("d.png", "dog")]


@pytest.fixture
def folder(tmp_path):
    """Four images, a.png to d.png."""
    for file, _ in ROWS:
        Image.new("L", (6, 4), 7).save(tmp_path / file)
    return tmp_path


def write(path: Path, *rows: tuple[str, ...], delimiter: str = ",", encoding: str = "utf-8") -> Path:
    with path.open("w", encoding=encoding, newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows(rows)
    return path


def pairs(data: Data) -> dict[str, list[tuple[str, str]]]:
    """The file and the class of every image, by split."""
    return {
        split: [(Path(images.name(i)).name, data.classes[images.targets[i]]) for i in range(len(images))]
        for split, images in data.splits.items()
    }


def every(data: Data) -> list[tuple[str, str]]:
    return sorted(pair for split in pairs(data).values() for pair in split)


# What is read


def test_a_table_without_splits_is_split_class_by_class(folder):
    data = open_data(write(folder / "pets.csv", ("image", "label"), *ROWS), val_fraction=0.5)
    assert (data.name, data.classes, data.size, data.channels) == ("pets", ("cat", "dog"), (4, 6), 1)
    assert every(data) == ROWS
    assert data.splits["val"].targets.tolist() == [0, 1]
    assert isinstance(data.splits["train"], FileSplit)
    assert data.splits["train"].image(0).shape == (4, 6, 1)


@pytest.mark.parametrize("order", ["train val test test", "TRAIN Valid testing test", "training Validation TEST test"])
def test_the_split_column_is_honoured_in_every_spelling(folder, order):
    labels = ["cat", "cat", "dog", "cat"]
    rows = [(split, label, file) for (file, _), label, split in zip(ROWS, labels, order.split(), strict=True)]
    table = write(folder / "pets.csv", ("Split", "label", "image"), ("train", "dog", "e.png"), *rows)
    Image.new("L", (6, 4), 7).save(folder / "e.png")
    assert pairs(open_data(table)) == {
        "train": [("a.png", "cat"), ("e.png", "dog")],
        "val": [("b.png", "cat")],
        "test": [("d.png", "cat"), ("c.png", "dog")],
    }


@pytest.mark.parametrize(
    ("file", "delimiter", "encoding"),
    [
        ("pets.csv", ",", "utf-8"),
        ("pets.csv", ";", "utf-8"),
        ("pets.CSV", ",", "utf-8-sig"),
        ("pets.tsv", "\t", "utf-8"),
        ("pets.TSV", "\t", "utf-8-sig"),
    ],
)
def test_delimiters_and_byte_order_marks(folder, file, delimiter, encoding):
    rows = [(path, f"{label}, größer; als") for path, label in ROWS]
    data = open_data(write(folder / file, ("image", "label"), *rows, delimiter=delimiter, encoding=encoding))
    assert data.classes == ("cat, größer; als", "dog, größer; als")
    assert every(data) == rows


def test_paths_begin_at_the_folder_of_the_table_or_are_absolute(folder, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    (folder / "tables").mkdir()
    rows = [(f"../{file}" if label == "cat" else str(folder / file), label) for file, label in ROWS]
    table = write(folder / "tables" / "pets.csv", ("image", "label"), *rows)
    assert every(open_data(table)) == ROWS
    monkeypatch.chdir(table.parent)
    assert every(open_data("pets.csv")) == ROWS


def test_labels_are_text_as_it_stands_and_spaces_and_empty_rows_do_not_count(folder):
    rows = [(f" {file} ", " 3" if label == "cat" else "10 ") for file, label in ROWS]
    table = write(folder / "pets.csv", ("image ", " label"), rows[0], ("", ""), *rows[1:], ())
    data = open_data(table)
    assert data.classes == ("10", "3")
    assert every(data) == [(file, "3" if label == "cat" else "10") for file, label in ROWS]


# Columns


@pytest.mark.parametrize("image", ["image", "IMAGE_PATH", "path", "File", "filename", "filepath", "img"])
@pytest.mark.parametrize("label", ["label", "Class", "target", "category", "Y"])
def test_columns_are_found_by_their_names(folder, image, label):
    rows = [("x", label, file, "z") for file, label in ROWS]
    assert every(open_data(write(folder / "pets.csv", ("first", label, image, "last"), *rows))) == ROWS


def test_of_several_known_names_the_surest_is_taken(folder):
    rows = [("x", file, "y", label) for file, label in ROWS]
    assert every(open_data(write(folder / "pets.csv", ("file", "Path", "class", "label"), *rows))) == ROWS


def test_columns_are_found_by_what_they_hold(folder):
    rows = [(str(i), label, file) for i, (file, label) in enumerate(ROWS)]
    assert every(open_data(write(folder / "pets.csv", ("", "kind", "photo"), *rows))) == ROWS  # pandas' index


def test_the_columns_that_are_given_win(folder, caplog):
    rows = [("no.png", label, file, "no", "val") for file, label in ROWS]
    table = write(folder / "pets.csv", ("image", "kind", "photo", "label", "split"), *rows)
    with caplog.at_level(logging.INFO, "vitrail"):
        data = open_data(table, image_column="photo", label_column="kind", model=Multiclass(("cat", "dog")))
    assert pairs(data) == {"val": ROWS}
    assert "images are in the column 'photo', labels in 'kind'" in caplog.text


def test_a_column_called_split_may_be_the_label(folder):
    table = write(folder / "pets.csv", ("image", "split"), *ROWS)
    assert every(open_data(table, label_column="split")) == ROWS


@pytest.mark.parametrize(
    ("header", "given", "message"),
    [
        (("image", "a", "b"), {}, "which of the columns image, a, b has the labels? Set --label-column."),
        (("key", "label", "b"), {}, "which of the columns key, label, b has the paths? Set --image-column."),
        (("image", "split", ""), {}, "has no column of labels or captions: it has image, split. Add one"),
        (("image", "label", "b"), {"image_column": "imag"}, "has no column 'imag'. Did you mean 'image'?"),
        (("image", "label", "b"), {"label_column": "x"}, "has no column 'x'. It has image, label, b."),
        (("image", "label", "b"), {"label_column": "image", "image_column": "image"}, "'image' cannot be both"),
        (("image", "label", "label"), {}, "has two columns named 'label'"),
    ],
)
def test_columns_that_cannot_be_told_are_a_user_error(folder, header, given, message):
    table = write(folder / "pets.csv", header, ("a", "b", "train"))
    with pytest.raises(UserError) as error:
        open_data(table, **given)
    assert str(table) in str(error.value)
    assert message in str(error.value)


def test_columns_are_of_tables_only():
    for given in ({"image_column": "x"}, {"label_column": "x"}):
        with pytest.raises(UserError, match=r"apply to tables .* but digits is neither"):
            open_data("digits", **given)


# Rows


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([("", "cat", "train")], "row 6 has no image"),
        ([("a.png", " ", "train")], "row 6 has no label"),
        ([(), ("a.png", "", "train")], "row 7 has no label"),
        ([("a.png", "cat", "dev")], "the split in row 6 must be train, val or test, but it is 'dev'"),
        ([("a.png", "cat", "")], "the split in row 6 must be train, val or test, but it is ''"),
        ([("a.png", "cat")], "row 6 has 2 cells, but the header has 3"),
        ([("a.png", "cat", "train", "x")], "row 6 has 4 cells, but the header has 3"),
        ([("./a.png", "dog", "train")], "a.png has two labels, 'cat' and, in row 6, 'dog'"),
        ([("a.png", "cat", "val")], "a.png is in two splits, train and, in row 6, val"),
    ],
)
def test_what_is_wrong_with_a_row_is_said_with_its_number(folder, rows, message):
    good = [(*row, "train") for row in ROWS]
    table = write(folder / "pets.csv", ("image", "label", "split"), *good, *rows)
    with pytest.raises(UserError) as error:
        open_data(table)
    assert str(table) in str(error.value)
    assert message in str(error.value)


def test_a_file_that_is_listed_twice_is_one_image_and_that_is_said(folder, caplog):
    data = open_data(write(folder / "pets.csv", ("image", "label"), *ROWS, ROWS[0], ("./b.png", "cat")))
    assert every(data) == ROWS
    assert "pets.csv: skipping 2 duplicate rows." in caplog.text


def test_files_are_proven_as_those_of_folders_are(folder):
    table = write(folder / "pets.csv", ("image", "label"), *ROWS, ("gone.png", "cat"))
    with pytest.raises(UserError, match=r"1 of 5 images \(20\.0%\) cannot be read.*gone\.png \(no such file"):
        open_data(table)
    for i in range(200):
        (folder / f"copy{i}.png").symlink_to(folder / "a.png")
    with table.open("a") as file:
        file.writelines(f"copy{i}.png,dog\n" for i in range(200))
    data = open_data(table)
    assert data.unreadable == ((str(folder / "gone.png"), "no such file or directory"),)
    assert len(every(data)) == 204


# Whole files


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty. It must have a header row"),
        (b"\n,\n", "is empty"),
        (b"image,label\n", "has no rows"),
        (b"a.png,cat\nb.png,dog\n", "must have a header row with column names, but its first row is a.png, cat"),
        ("image,label\nä.png,cat\n".encode("latin-1"), "must be UTF-8 text"),
        ("image,label\na.png,cat\n".encode("utf-16"), "must be UTF-8 text"),
        (b'image,label\na.png,"cat\nb.png,dog\n', "line 3 is not valid CSV"),
        (b"image,label\na.png,cat\nb.png,cat\n", "has only one class, 'cat'"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(folder, content, message):
    table = folder / "pets.csv"
    table.write_bytes(content)
    with pytest.raises(UserError) as error:
        open_data(table)
    assert str(table) in str(error.value)
    assert message in str(error.value)


# Parquet


def test_parquet_without_pyarrow_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # as if it were not installed
    (folder / "pets.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"reading Parquet needs pyarrow: pip install 'vitrail\[data\]'"):
        open_data(folder / "pets.parquet")


def test_parquet_is_read_like_text(folder):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = folder / "pets.parquet"
    files, labels = [file for file, _ in ROWS], [3, 3, 10, 10]
    parquet.write_table(pyarrow.table({"image": files, "label": labels, "size": [1.5] * 4}), table)
    data = open_data(table)
    assert data.classes == ("10", "3")
    assert every(data) == [(file, str(label)) for file, label in zip(files, labels, strict=True)]
    parquet.write_table(pyarrow.table({"image": files, "label": [3, None, 10, 10]}), table)
    with pytest.raises(UserError, match="row 2 has no label"):
        open_data(table)
    table.write_bytes(b"words")
    with pytest.raises(UserError, match=r"pets\.parquet"):
        open_data(table)


@pytest.mark.parametrize("columns", [{"image": ["a.png"] * 10**6}, {"image": ["a.png"], "tags": [[0] * 10**6]}])
def test_parquet_files_of_a_million_equal_values_are_not_read(folder, columns, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), folder / "pets.parquet")
    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", None)
    with pytest.raises(UserError, match=r"pets\.parquet .*: it has 1,000,0\d\d values in [\d,]+ bytes"):
        open_data(folder / "pets.parquet")


def test_large_parquet_files_of_names_that_compress_well_are_read(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    names = [f"train/{i:08}.png" for i in range(200_000)]
    table = pyarrow.table({"image": names, "label": ["x"] * len(names)})
    parquet.write_table(table, tmp_path / "a.parquet", compression="zstd")
    columns, rows = _read_parquet(tmp_path / "a.parquet")
    assert columns == ["image", "label"]
    assert [rows[1], rows[len(names)]] == [[names[0], "x"], [names[-1], "x"]]


# From end to end


def test_a_run_on_a_table_is_evaluated_and_resumed_on_its_own_split(tmp_path, digits, small):
    (tmp_path / "images").symlink_to(digits, target_is_directory=True)
    rows = [(f"images/{file.relative_to(digits)}", file.parent.name, "x") for file in sorted(digits.glob("*/*.png"))]
    table = write(tmp_path / "digits.csv", ("photo", "kind", "who"), *rows)
    columns = {"image_column": "photo", "label_column": "kind"}
    run = vitrail.train(table, out=tmp_path / "runs", name="run", seed=3, **columns, **small)
    written = json.loads((run / "evaluation" / "digits-val" / "metrics.json").read_text())
    held_out = open_data(table, val_fraction=small["val_fraction"], seed=3, **columns).splits["val"]
    metrics = vitrail.evaluate(run)
    assert metrics.to_json() == {name: written[name] for name in metrics.to_json()}
    assert [score.support for score in metrics.per_class] == [int((held_out.targets == i).sum()) for i in range(10)]
    assert vitrail.evaluate(run, table).loss == metrics.loss
    assert vitrail.train(resume=run) == run
    other = write(tmp_path / "other.csv", ("photo", "kind", "who"), *rows[:30])
    assert vitrail.evaluate(run, other, **columns).per_class[0].support > 0
    with pytest.raises(UserError, match="Set --label-column"):
        vitrail.evaluate(run, other)


def kaggle(folder: Path) -> Path:
    """A table of names without suffixes, whose images are one folder further."""
    (folder / "pictures").mkdir()
    rows = []
    for number in range(12):
        Image.new("L", (8, 8), 20 * number).save(folder / "pictures" / f"x.{number}.{'png' if number % 2 else 'jpg'}")
        rows.append(f"x.{number},{'ab'[number % 2]}")
    table = folder / "train.csv"
    table.write_text("image_id,label\n" + "\n".join(rows) + "\n")
    return table


def test_names_without_suffixes_in_another_folder(tmp_path, monkeypatch):
    table = kaggle(tmp_path)
    data = open_data(table, image_dir=str(tmp_path / "pictures"))
    assert sum(map(len, (data.splits["train"], data.splits["val"]))) == 12
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"None of the images in the column 'image_id' of train.csv exist: x.0 is the"):
        open_data("train.csv")
    with pytest.raises(UserError, match=r"Use --image-dir pictures\."):
        open_data("train.csv")
    with pytest.raises(UserError, match="--image-dir must be a folder, but nowhere is none"):
        open_data("train.csv", image_dir="nowhere")
    with pytest.raises(UserError, match="--image-dir applies to tables"):
        open_data("digits", image_dir="pictures")


def test_a_run_remembers_where_the_images_of_its_table_are(tmp_path, monkeypatch, tiny, caplog):
    import vitrail

    caplog.set_level("INFO", "vitrail")
    table = kaggle(tmp_path)
    monkeypatch.chdir(tmp_path)
    run = vitrail.train(table, image_dir="pictures", out="runs", name="run", **tiny | {"batch_size": 4})
    monkeypatch.chdir(tmp_path.parent)
    run = tmp_path / "runs" / "run"
    assert vitrail.evaluate(run).images > 0
    assert sum("images are in the column" in message for message in caplog.messages) == 1
    table.rename(tmp_path / "moved.csv")
    with pytest.raises(UserError, match=r"is no longer there. If it has moved, give its new place: vitrail evaluate"):
        vitrail.evaluate(run)
