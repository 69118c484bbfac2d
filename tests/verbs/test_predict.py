"""`vitrail predict`: thresholds and files."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest

import vitrail
from vitrail.errors import UserError
from vitrail.tasks import Multilabel


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


def test_one_mistake_is_named_alone(trained, digits):
    with pytest.raises(UserError, match=r"^'top' must be at least 1, but it is 0\.$"):
        vitrail.predict(trained, [digits], top=0)
