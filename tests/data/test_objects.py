"""Data sets as Python objects are the same data as the files of them."""

from __future__ import annotations

import csv
import io

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from vitrail.data import open_data
from vitrail.errors import UserError

RNG = np.random.default_rng(0)
X = RNG.integers(0, 256, (40, 9, 7, 3), dtype=np.uint8)
Y = np.arange(40) % 4
NAMES = np.array(["ant", "bee", "cow", "dog"])


def same(one, other):
    """Two data sets have the same images and targets, in the same splits."""
    assert (one.task, one.size, one.channels, one.bits) == (other.task, other.size, other.channels, other.bits)
    assert one.splits.keys() == other.splits.keys()
    for name, split in one.splits.items():
        theirs = other.splits[name]
        assert np.array_equal(split.targets, theirs.targets)
        assert all(np.array_equal(split.image(i), theirs.image(i)) for i in range(len(split)))
    assert one.fingerprint() == other.fingerprint()


def archive(folder, **arrays):
    np.savez(folder / "data.npz", **arrays)
    return folder / "data.npz"


class Items(torch.utils.data.Dataset):
    """A map-style data set of any images and targets."""

    def __init__(self, images, targets, **more):
        self.images, self.targets = images, targets
        vars(self).update(more)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.images[i], self.targets[i]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The images as files, and a table of them."""
    folder = tmp_path_factory.mktemp("files")
    for i, image in enumerate(X):
        Image.fromarray(image).save(folder / f"{i}.png")
    with (folder / "data.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["image", "label"])
        rows.writerows((f"{i}.png", NAMES[label]) for i, label in enumerate(Y))
    return folder


# Arrays and tensors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "images",
    [
        X,
        X.transpose(0, 3, 1, 2),
        torch.from_numpy(X.transpose(0, 3, 1, 2).copy()),
        torch.from_numpy(X.transpose(0, 3, 1, 2).copy()) / 255,
        X / 255,
        X.astype(np.int32),
        list(X),
        [Image.fromarray(image) for image in X],
        [torch.from_numpy(image.transpose(2, 0, 1).copy()) / 255 for image in X],
    ],
    ids=["array", "channels-first", "tensor", "float-tensor", "floats", "integers", "list", "PIL", "tensors"],
)
def test_images_of_any_kind_are_those_of_the_archive(images, tmp_path):
    same(open_data((images, Y)), open_data(archive(tmp_path, images=X, labels=Y)))


@pytest.mark.parametrize(
    ("labels", "stored"),
    [
        (NAMES[Y].tolist(), NAMES[Y]),
        (torch.from_numpy(Y), Y),
        (Y[:, None], Y),
        ([bool(y % 2) for y in Y], Y % 2),
        ([torch.tensor(int(y)) for y in Y], Y),
        ((Y / 3).tolist(), Y / 3),
        (torch.from_numpy(Y / 3).float(), (Y / 3).astype(np.float32)),
        (np.eye(4)[Y].tolist(), np.eye(4)[Y]),
        ([(y, y / 7) for y in Y.tolist()], np.stack([Y, Y / 7], 1)),
    ],
    ids=["names", "tensor", "column", "bools", "tensors", "floats", "float-tensor", "multi-hot", "values"],
)
def test_labels_of_any_kind_are_those_of_the_archive(labels, stored, tmp_path):
    same(open_data((X, labels)), open_data(archive(tmp_path, images=X, labels=stored)))


def test_lists_of_names_are_labels(tmp_path):
    labels = [[NAMES[y], "odd"] if y % 2 else [NAMES[y]] for y in Y]
    data = open_data((X, labels))
    assert (data.task.name, data.classes) == ("multilabel", ("ant", "bee", "cow", "dog", "odd"))
    hot = np.concatenate([np.eye(4)[Y], (Y % 2)[:, None]], 1)
    same(data, open_data(archive(tmp_path, images=X, labels=hot, classes=np.array(data.classes))))


def test_the_task_may_be_given(tmp_path):
    same(
        open_data((X, Y.astype(float)), task="regression"),
        open_data(archive(tmp_path, images=X, labels=Y.astype(float)), task="regression"),
    )


def test_sixteen_bits_and_other_floats_keep_their_depth(tmp_path):
    deep = X.astype(np.uint16) * 250
    same(open_data((deep, Y)), open_data(archive(tmp_path, images=deep, labels=Y)))
    assert open_data((list(deep), Y)).bits == 16
    normalised = open_data((list(X / 127.5 - 1), Y))
    assert normalised.bits == 32
    assert normalised.splits["val"].image(0).min() < 0


# Lists, data sets and frames ----------------------------------------------------------------------------------


def test_pairs_of_paths_are_files(files):
    pairs = [(files / f"{i}.png", NAMES[y]) for i, y in enumerate(Y)]
    data = open_data(pairs)
    assert data.splits["train"].name(0) == str(files / "0.png")
    same(data, open_data((X, NAMES[Y])))
    same(open_data([(str(path), label) for path, label in pairs]), data)
    same(open_data([(path.read_bytes(), label) for path, label in pairs]), data)
    same(open_data([[Image.open(io.BytesIO(path.read_bytes())), label] for path, label in pairs]), data)


def test_an_unreadable_image_is_left_out(files):
    pairs = [(files / f"{i % 40}.png", int(Y[i % 40])) for i in range(200)]
    data = open_data([*pairs, (b"nothing", 0)])
    assert data.unreadable == (("images/200", "not an image"),)
    assert sum(map(len, data.splits.values())) == 200
    with pytest.raises(UserError, match="5 of 45 images"):
        open_data((list(X) + [b"nothing"] * 5, [*Y, 0, 0, 0, 0, 0]))


@pytest.mark.parametrize("kind", ["PIL", "tensor", "float"])
def test_a_torch_data_set_is_its_items(kind):
    made = {
        "PIL": Image.fromarray,
        "tensor": lambda image: torch.from_numpy(image.transpose(2, 0, 1).copy()),
        "float": lambda image: torch.from_numpy(image.transpose(2, 0, 1).copy()) / 255,
    }[kind]
    images = [made(image) for image in X]
    same(open_data(Items(images, Y)), open_data((X, Y)))
    same(open_data(Items(images, torch.from_numpy(Y), classes=list(NAMES))), open_data((X, NAMES[Y])))
    same(open_data(torch.utils.data.Subset(Items(images, Y), range(20))), open_data((X[:20], Y[:20])))


def test_images_of_a_data_set_may_differ_in_size():
    images = [Image.fromarray(image[: 5 + i % 4]) for i, image in enumerate(X)]
    data = open_data(Items(images, Y))
    assert data.size == (6, 7)
    assert data.splits["train"].image(1).shape[0] == 6


def test_a_hugging_face_data_set_is_that_of_its_files(files, tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=NAMES.tolist())})
    rows = {"image": [str(files / f"{i}.png") for i in range(40)], "label": Y.tolist()}
    whole = datasets.Dataset.from_dict(rows, features)
    whole.save_to_disk(tmp_path / "saved")
    same(open_data(whole), open_data(tmp_path / "saved"))
    parts = datasets.DatasetDict({"train": whole.select(range(30)), "validation": whole.select(range(30, 40))})
    data = open_data(parts)
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 30, "val": 10}
    with pytest.raises(UserError, match="is streamed, so it has no random access"):
        open_data(whole.to_iterable_dataset())
    with pytest.raises(UserError, match=r"which of the columns image contains the labels\?"):
        open_data(whole.remove_columns("label"))


def test_labels_of_a_hugging_face_data_set_may_be_lists_or_numbers(files):
    datasets = pytest.importorskip("datasets")
    paths = [str(files / f"{i}.png") for i in range(40)]
    kind = datasets.Sequence(datasets.ClassLabel(names=NAMES.tolist()))
    lists = {"image": paths, "tags": [[int(y), 0] for y in Y]}
    data = open_data(datasets.Dataset.from_dict(lists, datasets.Features({"image": datasets.Image(), "tags": kind})))
    assert (data.task.name, data.classes) == ("multilabel", tuple(NAMES))
    numbers = datasets.Dataset.from_dict({"image": paths, "age": (Y / 3).tolist()}).cast_column(
        "image", datasets.Image()
    )
    assert open_data(numbers, label_column="age").task.name == "regression"


@pytest.mark.parametrize("package", ["pandas", "polars"])
def test_a_frame_is_its_table(package, files, monkeypatch):
    frames = pytest.importorskip(package)
    monkeypatch.chdir(files)
    frame = frames.DataFrame({"image": [f"{i}.png" for i in range(40)], "label": NAMES[Y].tolist()})
    same(open_data(frame), open_data("data.csv"))
    columns = {
        "file": [str(files / f"{i}.png") for i in range(40)],
        "x": Y / 3,
        "y": Y,
        "split": ["train"] * 30 + ["val"] * 10,
    }
    data = open_data(frames.DataFrame(columns), label_column=["x", "y"])
    assert (data.task.name, data.classes, len(data.splits["val"])) == ("regression", ("x", "y"), 10)
    tags = open_data(
        frames.DataFrame({"image": [f"{i}.png" for i in range(40)], "tags": [["a", "b"][y % 2 :] for y in Y]})
    )
    assert (tags.task.name, tags.classes) == ("multilabel", ("a", "b"))


def test_opened_data_is_taken_as_it_is(files):
    data = open_data(files / "data.csv")
    same(open_data(data), data)
    whole = open_data((X, Y), model=open_data((X, Y)).task)
    assert list(whole.splits) == ["all"]
    same(open_data(whole), open_data((X, Y)))
    unlabelled = open_data(data, task="mae")
    assert unlabelled.splits["train"].targets.shape == (32, 0)


def test_validation_data_may_be_given_apart(files, tmp_path):
    expected = open_data(archive(tmp_path, x_train=X[:30], y_train=NAMES[Y][:30], x_val=X[30:], y_val=NAMES[Y][30:]))
    paths = [(files / f"{i}.png", NAMES[Y[i]]) for i in range(30, 40)]
    for val in ((X[30:], NAMES[Y][30:]), paths, Items(list(X[30:]), NAMES[Y][30:])):
        same(open_data((X[:30], NAMES[Y][:30]), val=val), expected)
    same(open_data(archive(tmp_path, images=X[:30], labels=NAMES[Y][:30]), val=paths), expected)
    with pytest.raises(UserError, match="has a class 'eel' that the model does not know"):
        open_data((X, NAMES[Y]), val=(X, ["eel"] * 40))
    with pytest.raises(UserError, match="Remove either val or folds"):
        open_data((X, Y), val=(X, Y), folds=2, fold=1)


def test_images_alone_are_data_without_labels(files):
    for source in (
        X,
        list(X),
        (X, Y),
        [files / f"{i}.png" for i in range(40)],
        Items(list(X), Y),
        list(zip(X, Y, strict=True)),
    ):
        data = open_data(source, task="mae")
        assert data.splits["train"].targets.shape == (32, 0)
        assert sum(map(len, data.splits.values())) == 40
    with pytest.raises(UserError, match="python:arrays has no labels"):
        open_data(X)


# Mistakes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ((X, Y[:-1]), "one label per image, but it has 40 images and 39 labels"),
        ((X[:, 0, 0], Y), "must have the shape"),
        ((list(X), [None] * 40), "label 0 is missing"),
        ((X, [[1, 2], [3]] * 20), "must have one length"),
        ((X, ["a", 1] * 20), "but they are int and str"),
        ([(X[0], 1), X[1]], "item 1 is an array of shape"),
        ((X, np.array([object()] * 40)), "label 0 is an object of type object"),
        (Items([{"pixels": 1}] * 4, Y), "An image must be"),
        (iter([]), "Data from Python must be"),
        (7, "Data from Python must be"),
        ({"train": X}, "Data from Python must be"),
        ([X, Y], r"must be a tuple, \(images, labels\), but they are a list"),
    ],
    ids=range(12),
)
def test_errors_never_print_arrays(source, message):
    with pytest.raises(UserError, match=message) as caught:
        open_data(source)
    assert len(str(caught.value)) < 400


def test_labels_beside_the_images_are_part_of_the_data():
    for verb in (vitrail.train, vitrail.pretrain, vitrail.check):
        with pytest.raises(UserError, match=r"as one pair: vitrail\.\w+\(\(images, labels\)\)"):
            verb(X, Y)


def test_check_audits_objects(tmp_path):
    images = [*X, X[0]]
    found = vitrail.check((images, [*Y, 1]), out=tmp_path)
    assert [finding.kind for finding in found.findings if finding.severity == "error"] == ["conflict"]
    assert found.name == "images"
