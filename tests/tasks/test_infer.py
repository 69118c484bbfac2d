"""The task is seen from the labels, its targets are right, and every split is a fair one."""

from __future__ import annotations

import csv
import logging
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitrail.config import TrainConfig, coerce
from vitrail.data import open_data
from vitrail.data.holdout import hold_out
from vitrail.errors import UserError
from vitrail.tasks import Multilabel, Regression
from vitrail.tasks.infer import infer_from_text


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Forty images, 0.png to 39.png."""
    folder = tmp_path_factory.mktemp("pictures")
    for i in range(40):
        Image.new("L", (4, 4), i).save(folder / f"{i}.png")
    return folder


@pytest.fixture
def table(pictures, tmp_path):
    """Writes a table of the images, with columns of labels as they are given."""

    def write(**columns: list[object]) -> Path:
        path = tmp_path / "table.csv"
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["image", *columns])
            writer.writerows([pictures / f"{i}.png", *row] for i, row in enumerate(zip(*columns.values(), strict=True)))
        return path

    return write


def whole(path, **settings):
    """All images of a table as one split, in the order of the rows."""
    data = open_data(path, val_fraction=0.5, **settings)
    splits = [data.splits[name] for name in data.splits]
    rows = {int(Path(split.name(i)).stem): split.targets[i].tolist() for split in splits for i in range(len(split))}
    return data, [rows[i] for i in sorted(rows)]


# What is seen in labels


@pytest.mark.parametrize(
    ("cells", "task"),
    [
        (["cat", "dog", "cat"], "multiclass"),
        (["golden retriever", "labrador retriever", "golden labrador"], "multiclass"),  # spaces part words, not labels
        (["tench, Tinca tinca", "shark, white shark"], "multiclass"),  # a comma in a name
        (["a|b", "c"], "multilabel"),
        (["a;b", "a", "b", ""], "multilabel"),
        (["a, b", "b, c", "c, a", "a, b, c"], "multilabel"),
        (["3,1", "1", "3", "3,2", "2"], "multilabel"),
        (["0", "1", "1"], "multiclass"),
        (["0.5", "1", "1"], "regression"),
        (["-1e-3", "2"], "regression"),
        (["1.0", "2.0", "1.0"], "multiclass"),  # whole numbers that pandas made floats
        ([str(i) for i in range(100)], "regression"),
        ([str(i % 50) for i in range(1000)], "multiclass"),
        ([str(i % 10) for i in range(20)], "multiclass"),
        (["nan", "1.5"], "multiclass"),
    ],
)
def test_the_task_of_one_column(cells, task):
    assert infer_from_text({"label": cells}) == task


@pytest.mark.parametrize(
    ("columns", "task"),
    [
        ({"a": ["0", "1"], "b": ["1", "1"]}, "multilabel"),
        ({"a": ["0", "1.0"], "b": ["True", "false"]}, "multilabel"),
        ({"a": ["0", "1"], "b": ["1", "2"]}, "regression"),
    ],
)
def test_the_task_of_several_columns(columns, task):
    assert infer_from_text(columns) == task


# Multi-label


def test_lists_of_labels_become_columns_of_0_and_1_and_that_is_said(table, caplog):
    with caplog.at_level(logging.INFO, "vitrail"):
        data, targets = whole(table(labels=["cat|dog", "", "dog", " cat | bird ", "bird|", "cat"]))
    assert (data.task.name, data.classes) == ("multilabel", ("bird", "cat", "dog"))
    assert targets == [[0, 1, 1], [0, 0, 0], [0, 0, 1], [1, 1, 0], [1, 0, 0], [0, 1, 0]]
    assert data.splits["train"].targets.dtype == np.float32
    assert "task: multi-label, 3 labels" in caplog.text
    assert "--task multiclass, regression or pairs" in caplog.text


def test_spaces_part_labels_when_the_task_says_so(table):
    path = table(tags=["haze primary", "primary", "haze", "primary water"])
    data, targets = whole(path, task="multilabel")
    assert data.classes == ("haze", "primary", "water")
    assert targets == [[1, 1, 0], [0, 1, 0], [1, 0, 0], [0, 1, 1]]


def test_columns_of_0_and_1_are_labels_without_being_named(table):
    path = table(cat=[1, 0, 1, 0], dog=[1, 1, 0, 0], split=["train", "train", "val", "val"])
    data = open_data(path)
    assert (data.task.name, data.classes) == ("multilabel", ("cat", "dog"))
    assert data.splits["train"].targets.tolist() == [[1, 1], [0, 1]]
    assert data.splits["val"].targets.tolist() == [[1, 0], [0, 0]]


def test_one_column_of_0_and_1_is_a_label_when_the_task_says_so(table):
    data, targets = whole(table(smiles=[1, 0, 1, 0]), task="multilabel")
    assert (data.classes, targets) == (("smiles",), [[1], [0], [1], [0]])


# Regression


def test_numbers_are_kept_and_columns_may_be_given_in_every_form(table):
    path = table(x=[1.5, 2, 3, 4], y=[-1, 0, 1e2, 5], who=["a", "b", "c", "d"])
    for given in ("x,y", ["x", "y"], ("x", "y"), "x, y"):
        data, targets = whole(path, label_column=given)
        assert (data.task.name, data.classes) == ("regression", ("x", "y"))
        assert targets == [[1.5, -1], [2, 0], [3, 100], [4, 5]]
        assert coerce(TrainConfig, "label_column", given) == ("x", "y")
    assert whole(path, label_column="y", task="regression")[1] == [[-1], [0], [100], [5]]


def test_the_task_overrules_what_numbers_look_like(table):
    path = table(age=[20, 20, 30, 30])
    assert open_data(path).classes == ("20", "30")
    assert open_data(path, task="regression").classes == ("age",)
    assert open_data(table(grade=[1.5, 1.5, 2.5, 2.5]), task="multiclass").classes == ("1.5", "2.5")


def test_a_place_is_asked_for_and_not_taken_by_halves(table):
    with pytest.raises(UserError, match="which of the columns image, x, y has the labels"):
        open_data(table(x=[1.5, 2], y=[3, 4]))


def test_lists_in_parquet_are_lists_of_labels(pictures, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    labels = [["a", "b"], [], ["b"], ["a"]]
    images = [str(pictures / f"{i}.png") for i in range(4)]
    parquet.write_table(pyarrow.table({"image": images, "tags": labels}), tmp_path / "t.parquet")
    data, targets = whole(tmp_path / "t.parquet")
    assert (data.task.name, data.classes) == ("multilabel", ("a", "b"))
    assert targets == [[1, 1], [0, 0], [0, 1], [1, 0]]


# Mistakes


@pytest.mark.parametrize(
    ("columns", "given", "message"),
    [
        ({"a": [1, 2], "b": [3, "x"]}, {"label_column": "a,b"}, "'b' must be a number, but in row 3 it is 'x'"),
        ({"a": [1.5, "nan"]}, {"task": "regression"}, "'a' must be a number, but in row 3 it is 'nan'"),
        ({"a": [1.5, "1e99"]}, {}, "'a' must be a number, but in row 3 it is '1e99'"),
        ({"a": [0, 2], "b": [1, 1]}, {"label_column": "a,b", "task": "multilabel"}, "'a' must be 0 or 1, but in row 3"),
        ({"a": [0, 1], "b": [1, ""]}, {"label_column": "a,b"}, "row 3 has no b"),
        ({"a": [0.5, ""]}, {}, "row 3 has no a"),
        ({"a": [0, 1], "b": [1, 0]}, {"label_column": "a,b", "task": "multiclass"}, "needs one label column"),
        ({"a": [0, 1], "b": [1, 0]}, {"label_column": "a,a"}, "given twice"),
        ({"a": [2.5, 2.5], "b": [1, 3]}, {"label_column": "a,b"}, "'a' must vary"),
        ({"a": [0, 0], "b": [0, 1]}, {}, "No training image of .* has the label 'a'"),
        ({"labels": ["", ""]}, {"task": "multilabel"}, "has a label. Add labels"),
        ({"a": [1, 2]}, {"label_column": " ,"}, "'label_column' must be a name, or several as in x,y"),
    ],
)
def test_what_cannot_be_learnt_is_said(table, columns, given, message):
    with pytest.raises(UserError, match=message):
        open_data(table(**columns), **given)


def test_a_folder_has_classes_whatever_is_asked(digits):
    with pytest.raises(UserError, match="is multi-class data, so the task cannot be regression"):
        open_data(digits, task="regression")


# With the classes of a trained model


def test_labels_take_the_places_that_a_model_gave_them(table):
    data = open_data(table(labels=["b|a", "b", ""]), model=Multilabel(("c", "b", "a")))
    assert data.classes == ("c", "b", "a")
    assert data.splits["all"].targets.tolist() == [[0, 1, 1], [0, 1, 0], [0, 0, 0]]
    with pytest.raises(UserError, match="has a label 'b' that the model does not know"):
        open_data(table(labels=["b|a", "b", ""]), model=Multilabel(("a",)))


def test_names_that_a_model_knows_are_not_taken_apart(table):
    data = open_data(table(labels=["traffic light", "car"]), model=Multilabel(("car", "traffic light")))
    assert data.splits["all"].targets.tolist() == [[0, 1], [1, 0]]


def test_the_numbers_that_a_model_tells_are_found_by_their_names(table):
    path = table(y=[1, 2], label=["no", "no"], x=[3, 4])
    data = open_data(path, model=Regression(("x", "y")))
    assert data.splits["all"].targets.tolist() == [[3, 1], [4, 2]]
    with pytest.raises(UserError, match="The model predicts z, which"):
        open_data(path, model=Regression(("x", "y", "z")), label_column="x,y")


# Arrays


X = np.zeros((6, 3, 3), np.uint8)
FLAGS = np.array([[1, 0], [0, 1], [1, 1], [0, 0], [1, 0], [0, 1]])


@pytest.mark.parametrize(
    ("labels", "extra", "task", "classes"),
    [
        (FLAGS, {}, "multilabel", ("0", "1")),
        (FLAGS.astype(bool), {"classes": np.array(["cat", "dog"])}, "multilabel", ("cat", "dog")),
        (np.arange(6) / 2, {}, "regression", ("value",)),
        (np.arange(12).reshape(6, 2) / 2, {"classes": np.array(["x", "y"])}, "regression", ("x", "y")),
    ],
)
def test_arrays_tell_the_task_by_their_shape_and_type(tmp_path, labels, extra, task, classes):
    np.savez(tmp_path / "a.npz", x_train=X, y_train=labels, x_val=X, y_val=labels, **extra)
    data = open_data(tmp_path / "a.npz")
    assert (data.task.name, data.classes) == (task, classes)
    assert data.splits["val"].targets.tolist() == labels.reshape(6, -1).astype(float).tolist()
    assert data.splits["val"].targets.dtype == np.float32


def test_whole_numbers_in_arrays_are_numbers_when_the_task_says_so(tmp_path):
    np.savez(tmp_path / "a.npz", images=X, labels=np.array([1, 1, 2, 2, 3, 3]))
    assert open_data(tmp_path / "a.npz").classes == ("1", "2", "3")
    assert open_data(tmp_path / "a.npz", task="regression").classes == ("value",)
    for labels in (FLAGS * 2, np.full((6, 2), np.nan)):
        np.savez(tmp_path / "a.npz", images=X, labels=labels)
        with pytest.raises(UserError, match=r"must have the shape|K finite numbers"):
            open_data(tmp_path / "a.npz")


# Splits


def test_rare_labels_are_on_both_sides_of_a_split():
    rng = np.random.default_rng(0)
    targets = (rng.random((500, 6)) < [0.5, 0.4, 0.3, 0.1, 0.05, 0.01]).astype(np.float32)
    keep, held = hold_out(Multilabel(), targets, 0.2, seed=1)
    assert sorted([*keep, *held]) == list(range(500))
    shares = targets[held].sum(0) / targets.sum(0)
    assert targets[held].any(0).all()
    assert targets[keep].any(0).all()
    assert (abs(shares[:5] - 0.2) < 0.06).all()
    assert hold_out(Multilabel(), targets, 0.2, seed=1)[1].tolist() == held.tolist()


@pytest.mark.parametrize("seed", range(20))
def test_no_label_is_held_out_altogether(seed):
    # The last label is on an image of the first and on one of the second: by chance both would be held out.
    targets = np.array([[1, 0, 1], [1, 0, 0], [0, 1, 1], [0, 1, 0]], np.float32)
    keep, held = hold_out(Multilabel(), targets, 0.5, seed)
    assert targets[keep].any(0).all()
    assert len(held)


@pytest.mark.parametrize("images", [2, 9, 10, 23, 400])
def test_numbers_are_held_out_evenly_over_their_range(images):
    targets = np.random.default_rng(0).lognormal(size=(images, 2)).astype(np.float32)
    _, held = hold_out(Regression(), targets, 0.2, seed=0)
    assert abs(len(held) - 0.2 * images) <= 1
    if images == 400:
        tenths = Regression().strata(targets, 0.2)
        assert np.bincount(tenths[held]).tolist() == [8] * 10
        assert targets[tenths == 3, 0].max() < targets[tenths == 4, 0].min()
