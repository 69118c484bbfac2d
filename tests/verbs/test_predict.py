"""`vitrail predict`: thresholds and files."""

from __future__ import annotations

import csv
import json
import os

import numpy as np
import pytest
from stopping import Killed

import vitrail
from vitrail.errors import UserError
from vitrail.evaluate.predict import write_file
from vitrail.runs.predictor import Prediction
from vitrail.tasks import Multilabel
from vitrail.tasks.task import Answer


def test_predictions_below_a_threshold_are_left_out(trained, digits):
    files = [digits / "0" / "0.png", digits / "1" / "1.png"]
    for every, sure in zip(
        vitrail.predict(trained, files), vitrail.predict(trained, files, threshold=0.3), strict=True
    ):
        count = sum(p >= 0.3 for p in every.probabilities)
        assert (sure.labels, sure.probabilities) == (every.labels[:count], every.probabilities[:count])
    (none,) = vitrail.predict(trained, files[:1], threshold=1)
    assert none.labels == ()
    with pytest.raises(UserError, match="'threshold' must be a probability from 0 to 1, but it is 2"):
        vitrail.predict(trained, files, threshold=2)


def test_a_threshold_replaces_those_of_labels():
    task = Multilabel(("a", "b"), (0.9, 0.1))
    chances = np.array([[0.6, 0.2]])
    assert [answer.labels for answer in task.answers(chances)] == [("b",)]
    assert [answer.labels for answer in task.answers_above(chances, 0.5)] == [("a",)]


@pytest.mark.parametrize("format", ["csv", "json"])
def test_predictions_are_written_to_a_file_in_the_format_of_its_suffix(trained, digits, tmp_path, vitrail_says, format):
    out = tmp_path / f"answers.{format}"
    words = ["predict", trained, digits / "0", "--threshold", 0.5, "--out", out]
    assert vitrail_says(*words) == (0, "", "")
    count = len(list((digits / "0").iterdir()))
    if format == "csv":
        rows = list(csv.DictReader(out.read_text().splitlines()))
        assert rows[0].keys() == {"file", "labels", "probabilities", "error"}  # as many labels as are above
    else:
        rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == count
    assert vitrail_says("predict", trained, digits / "0", "--out", tmp_path / "answers.xml")[0] == 2
    for words in (["--format", "json", "--out", tmp_path / "a.csv"], ["--format", "coco", "--out", tmp_path / "a.txt"]):
        code, _, error = vitrail_says("predict", trained, digits / "0", *words)
        assert code == 2
        assert "is a file of --format" in error


@pytest.mark.parametrize("stop", [KeyboardInterrupt, Killed, RuntimeError])
def test_a_command_that_is_stopped_leaves_the_old_file(tmp_path, stop):
    def answers():
        yield Prediction("a.png", Answer(), None)
        assert [file.name for file in tmp_path.iterdir() if file != out] != []  # what SIGKILL would leave
        assert out.read_text() == "old"
        raise stop

    out = tmp_path / "answers.csv"
    out.write_text("old")
    with pytest.raises(stop):
        write_file(answers(), None, out)
    assert {file: file.read_text() for file in tmp_path.iterdir()} == {out: "old"}


def test_predictions_are_written_into_a_pipe(tmp_path):
    out = tmp_path / "pipe"
    os.mkfifo(out)
    reader = os.open(out, os.O_RDONLY | os.O_NONBLOCK)
    write_file([Prediction("a.png", Answer(), None)], "json", out)
    assert json.loads(os.read(reader, 1000))["file"] == "a.png"
    os.close(reader)
    assert out.is_fifo()


def test_one_mistake_is_named_alone(trained, digits):
    with pytest.raises(UserError, match=r"^'top' must be at least 1, but it is 0\.$"):
        vitrail.predict(trained, [digits], top=0)
