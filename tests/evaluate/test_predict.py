from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.data.images import read_image
from vitrail.data.preprocess import Preprocess
from vitrail.errors import UserError
from vitrail.evaluate.predict import find, write
from vitrail.models import Model, create
from vitrail.runs.predictor import Prediction, Predictor
from vitrail.tasks import Multiclass, Multilabel, Regression, Task
from vitrail.tasks.multilabel import LabelsAnswer
from vitrail.tasks.regression import ValuesAnswer
from vitrail.tasks.task import Answer
from vitrail.verbs.predict import predict
from vitrail.weights import Card, save

CLASSES = ("cat", "dog", "fox")


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    model = create("vit_nano2", img_size=8, channels=1, classes=3, depth=1).eval()
    torch.nn.init.normal_(model.head.weight)  # a fresh head is zero and would find all images alike
    return model


@pytest.fixture(scope="module")
def run(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    preprocess = Preprocess((8, 8), 1, crop=0.9)
    card = Card(model="vit_nano2", config=model.config, task=Multiclass(CLASSES), preprocess=preprocess)
    save(folder / "model.safetensors", model, card)
    return folder


def paint(*paths: Path) -> None:
    for number, path in enumerate(paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        random = np.random.default_rng(number)
        Image.fromarray(random.integers(0, 256, (12, 10, 3), np.uint8)).save(path)


def by_hand(model: Model, path: Path) -> list[tuple[str, float]]:
    """The classes of an image with their probabilities, likeliest first."""
    image = Preprocess((8, 8), 1, crop=0.9)(read_image(path))
    with torch.no_grad():
        probabilities = model(image[None])[0].softmax(dim=0).tolist()
    return sorted(zip(CLASSES, probabilities, strict=True), key=lambda pair: -pair[1])


def test_predictions_are_those_of_the_model_in_the_order_of_the_files(model: Model, run: Path, tmp_path: Path):
    files = [tmp_path / f"{i}.png" for i in (3, 1, 2, 0, 4)]
    paint(*files)
    predictions = list(predict(run, files, batch_size=2))
    assert [p.file for p in predictions] == [str(file) for file in files]
    for prediction, file in zip(predictions, files, strict=True):
        labels, probabilities = zip(*by_hand(model, file), strict=True)
        assert prediction.labels == labels
        assert prediction.probabilities == pytest.approx(probabilities, abs=1e-5)
        assert prediction.error is None


@pytest.mark.parametrize(("top", "given"), [(1, 1), (2, 2), (5, 3)])
def test_as_many_labels_as_asked_for_or_as_there_are_classes(run: Path, tmp_path: Path, top: int, given: int):
    paint(tmp_path / "a.png")
    (prediction,) = predict(run, [tmp_path / "a.png"], top=top)
    assert len(prediction.labels) == len(prediction.probabilities) == given


def test_bad_files_are_reported_in_their_place_and_the_rest_goes_on(model: Model, run: Path, tmp_path: Path):
    files = [tmp_path / f"{i}.png" for i in range(7)]
    paint(*files)
    files[0].write_bytes(b"")
    files[3].write_bytes(files[3].read_bytes()[:60])
    files[4].write_text("not an image")
    predictions = list(predict(run, [tmp_path], batch_size=2))
    assert [Path(p.file) for p in predictions] == files
    assert [i for i, p in enumerate(predictions) if p.error] == [0, 3, 4]
    assert predictions[4] == Prediction(str(files[4]), error="not an image")
    assert predictions[5].labels[0] == by_hand(model, files[5])[0][0]


def test_files_that_are_all_bad_need_no_model_to_say_so(run: Path, tmp_path: Path):
    (tmp_path / "a.png").write_bytes(b"")
    (prediction,) = predict(run, [tmp_path / "a.png"])
    assert prediction.error == "empty file"


def test_folders_are_searched_in_depth_and_sorted(tmp_path: Path):
    names = ["z.png", "b/2.PNG", "b/1.jpeg", "a/deep/x.webp"]
    paint(*(tmp_path / name for name in names))
    (tmp_path / "a" / "notes.txt").write_text("no image")
    paint(tmp_path / ".hidden.png", tmp_path / ".thumbnails" / "t.png")
    (tmp_path / "a" / "round").symlink_to(tmp_path)
    found = [Path(file).relative_to(tmp_path).as_posix() for file in find(str(tmp_path))]
    assert found == ["z.png", "a/deep/x.webp", "b/1.jpeg", "b/2.PNG"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.png", ["x1.png", "x2.png"]),
        ("x?.png", ["x1.png", "x2.png"]),
        ("x*", ["x1.png", "x2.png"]),
        ("**/*.png", ["b/c/y.png", "b/y.png", "d[1]/z.png", "x1.png", "x2.png"]),
        ("**", ["b/c/y.png", "b/y.png", "d[1]/z.png", "x1.png", "x2.png"]),
        ("b*", ["b/y.png", "b/c/y.png"]),
        ("d[1]/*", ["d[1]/z.png"]),
    ],
)
def test_globs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str, expected: list[str]):
    paint(*(tmp_path / name for name in ["x2.png", "x1.png", "b/y.png", "b/c/y.png", "d[1]/z.png"]))
    (tmp_path / "x.txt").write_text("no image")
    assert [Path(file).relative_to(tmp_path).as_posix() for file in find(f"{tmp_path}/{pattern}")] == expected
    monkeypatch.chdir(tmp_path)
    assert [Path(file).as_posix() for file in find(f"./{pattern}")] == expected


def test_a_file_that_is_named_is_tried_whatever_its_ending(model: Model, run: Path, tmp_path: Path):
    paint(tmp_path / "photo.png")
    plain = (tmp_path / "photo.png").rename(tmp_path / "photo [1]")
    (prediction,) = predict(run, [plain])
    assert prediction.labels[0] == by_hand(model, plain)[0][0]


def test_nothing_to_predict_is_an_error_before_anything_is_read(run: Path, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    for source, message in [
        ("missing.png", "does not exist"),
        ("empty", "contain no images"),
        ("*.jpg", "No image matches"),
    ]:
        with pytest.raises(UserError, match=message):
            predict(run, [tmp_path / source])
        with pytest.raises(UserError, match=message):
            predict(run, [tmp_path / source, tmp_path / source])


def test_a_missing_file_among_others_is_reported_like_an_unreadable_one(run: Path, tmp_path: Path, vitrail_says):
    paint(tmp_path / "a.png")
    names = [tmp_path / "missing.png", tmp_path / "a.png", tmp_path / "*.jpg"]
    errors = [p.error for p in predict(run, names)]
    assert errors == ["no such file or directory", None, "no such file or directory"]
    code, out, _ = vitrail_says("predict", run, *names)
    assert code == 1
    assert out.count("unreadable: no such file") == 2


def test_wrong_inputs_are_one_sentence(run: Path, tmp_path: Path):
    paint(tmp_path / "a.png")
    with pytest.raises(UserError, match="No images were given"):
        predict(run, [])
    with pytest.raises(UserError, match="must be at least 1"):
        predict(run, [tmp_path / "a.png"], top=0)
    with pytest.raises(UserError, match="neither a run folder nor a weights file"):
        predict(tmp_path / "nowhere", [tmp_path / "a.png"])


def test_reading_stays_near_what_is_asked_for(model: Model, tmp_path: Path):
    paint(tmp_path / "a.png")
    taken = 0

    def endless() -> Iterator[str]:
        nonlocal taken
        while True:
            taken += 1
            yield str(tmp_path / "a.png")

    card = Card(model="vit_nano2", config=model.config, task=Multiclass(CLASSES), preprocess=Preprocess((8, 8), 1))
    predictions = Predictor.of(model, card)(endless(), top=1, batch_size=4)
    for given in range(1, 50):
        assert next(predictions).labels
        assert given <= taken <= given + 3 * 4
    predictions.close()  # type: ignore[attr-defined]  # an iterator for its users
    assert taken < 50 + 3 * 4


PREDICTIONS = [
    Prediction("bad.png", error="truncated"),
    Prediction('a, "b".png', Answer(("cat", "dog"), (0.75, 0.25))),
    Prediction("c.png", Answer(("a longer name", "cat"), (1.0, 0.0))),
]


def test_csv_reads_back_even_if_the_first_file_is_bad():
    stream = io.StringIO()
    assert write(PREDICTIONS, "csv", stream) == 1
    header = stream.getvalue().splitlines()[0]
    assert header == "file,label,probability,label_2,probability_2,error"
    bad, a, c = csv.DictReader(io.StringIO(stream.getvalue()))
    assert (bad["file"], bad["label"], bad["error"]) == ("bad.png", "", "truncated")
    assert (a["file"], a["label"], float(a["probability"]), a["error"]) == ('a, "b".png', "cat", 0.75, "")
    assert (c["label_2"], float(c["probability_2"])) == ("cat", 0.0)


def test_csv_of_bad_files_alone_has_its_header():
    stream = io.StringIO()
    assert write(PREDICTIONS[:1], "csv", stream) == 1
    assert stream.getvalue() == "file,label,probability,error\nbad.png,,,truncated\n"


def test_json_lines_read_back():
    stream = io.StringIO()
    assert write(PREDICTIONS, "json", stream) == 1
    documents = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert documents[0] == {"file": "bad.png", "labels": [], "probabilities": [], "error": "truncated"}
    assert [tuple(document["labels"]) for document in documents] == [p.labels for p in PREDICTIONS]
    assert [tuple(document["probabilities"]) for document in documents] == [p.probabilities for p in PREDICTIONS]


def test_table_is_aligned_and_names_failures():
    stream = io.StringIO()
    assert write(PREDICTIONS, "table", stream) == 1
    assert stream.getvalue().splitlines() == [
        "bad.png     — unreadable: truncated",
        'a, "b".png  cat             75.0%  dog 25.0%',
        "c.png       a longer name  100.0%  cat 0.0%",
    ]


@pytest.mark.parametrize("format", ["csv", "json"])
def test_lines_are_written_and_flushed_as_they_come(format: str):
    class Stream(io.StringIO):
        flushed = 0

        def flush(self) -> None:
            self.flushed = len(self.getvalue().splitlines())

    stream = Stream()
    before = 1 if format == "csv" else 0  # the header

    def one_by_one() -> Iterator[Prediction]:
        for number in range(4):
            assert stream.flushed == (number + before if number else 0)
            yield Prediction(f"{number}.png", Answer(("cat",), (1.0,)))

    assert write(one_by_one(), format, stream) == 0
    assert stream.flushed == 4 + before


def written(predictions: list[Prediction], format: str) -> str:
    stream = io.StringIO()
    write(predictions, format, stream)
    return stream.getvalue()


def test_labels_are_written_as_a_table_that_can_be_read_back():
    predictions = [
        Prediction("0.png", LabelsAnswer(), "empty file"),
        Prediction("1.png", LabelsAnswer()),
        Prediction("2.png", LabelsAnswer(("a", "b"), (0.75, 0.5))),
    ]
    rows = list(csv.DictReader(io.StringIO(written(predictions, "csv"))))
    assert [row["labels"] for row in rows] == ["", "", "a|b"]
    assert [row["error"] for row in rows] == ["empty file", "", ""]
    assert rows[2]["probabilities"] == "0.750000|0.500000"
    assert json.loads(written(predictions, "json").splitlines()[2])["labels"] == ["a", "b"]
    assert written(predictions, "table").splitlines()[1:] == ["1.png  (no label)", "2.png  a   75.0%  b 50.0%"]


def test_values_are_written_in_columns_of_their_own():
    predictions = [
        Prediction("0.png", ValuesAnswer(), "empty file"),
        Prediction("1.png", ValuesAnswer(("x", "y"), values=(1.25, -3.0))),
    ]
    assert written(predictions, "csv") == "file,x,y,error\n0.png,,,empty file\n1.png,1.25,-3,\n"
    assert [json.loads(line) for line in written(predictions, "json").splitlines()] == [
        {"file": "0.png", "values": {}, "error": "empty file"},
        {"file": "1.png", "values": {"x": 1.25, "y": -3.0}, "error": None},
    ]
    assert written(predictions, "table").splitlines()[1] == "1.png  x 1.25  y -3"


def outputs(model: Model, path: Path) -> np.ndarray:
    with torch.no_grad():
        return model(Preprocess((8, 8), 1)(read_image(path))[None])[0].double().numpy()


def predicted(model: Model, task: Task, path: Path, top: int | None = None) -> Prediction:
    """The prediction of a run of this task."""
    card = Card(model="vit_nano2", config=model.config, task=task, preprocess=Preprocess((8, 8), 1))
    save(path.parent / "model.safetensors", model, card)
    (prediction,) = predict(path.parent, [path], top=top)
    return prediction


def test_all_labels_above_their_thresholds_are_predicted(model: Model, tmp_path: Path):
    image = tmp_path / "image.png"
    paint(image)
    chances = 1 / (1 + np.exp(-outputs(model, image)))
    limits = chances[0] + 1e-4, chances[1] - 1e-4, chances[2] - 1e-4  # missed, reached, reached
    prediction = predicted(model, Multilabel(CLASSES, limits), image)
    expected = sorted([(chances[1], "dog"), (chances[2], "fox")], reverse=True)
    assert prediction.labels == tuple(name for _, name in expected)
    assert prediction.probabilities == pytest.approx([chance for chance, _ in expected], abs=1e-5)
    assert predicted(model, Multilabel(CLASSES, limits), image, top=1).labels == (expected[0][1],)


def test_values_are_predicted_in_their_own_units(model: Model, tmp_path: Path):
    image = tmp_path / "image.png"
    paint(image)
    mean, std = (10.0, 20.0, 30.0), (1.0, 2.0, 3.0)
    prediction = predicted(model, Regression(CLASSES, mean, std), image)
    assert prediction.labels == CLASSES
    assert prediction.values == pytest.approx((mean + std * outputs(model, image)).tolist(), rel=1e-5)


def test_an_unreadable_image_has_an_empty_answer_of_the_task(model: Model, tmp_path: Path):
    image = tmp_path / "image.png"
    image.write_bytes(b"")
    prediction = predicted(model, Multilabel(CLASSES, (0.5,) * 3), image)
    assert written([prediction], "csv") == f"file,labels,probabilities,error\n{image},,,empty file\n"
    prediction = predicted(model, Regression(CLASSES, (0.0,) * 3, (1.0,) * 3), image)
    assert json.loads(written([prediction], "json")) == {"file": str(image), "values": {}, "error": "empty file"}
