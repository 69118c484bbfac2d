"""The service of a model that was trained on captions: words to choose from at /predict and /explain."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from served import Served, in_thread

import vitrail

LABELS = "a red circle,a blue bar,a green square"


@pytest.fixture(scope="module")
def words(worded: Path, trained: Path) -> Iterator[Served]:
    with in_thread(f"words={worded}", f"digits={trained}", timeout=20) as served:
        yield served


def test_labels_in_words(words, worded, captions):
    picture = captions.parent / "blue-bar-0.png"
    (expected,) = vitrail.predict(worded, [picture], labels=LABELS, engine="torch")
    found = words.predict(picture.read_bytes(), labels=LABELS, scores=True)
    assert tuple(found["labels"]) == expected.labels
    assert found["probabilities"] == pytest.approx(expected.probabilities, abs=1e-4)
    assert len(found["scores"]) == 3
    assert words.get("/model").json()["words"]
    assert not words.get("/model", model="digits").json()["words"]


def test_a_threshold_of_words(words, captions):
    content = (captions.parent / "blue-bar-0.png").read_bytes()
    whole = words.predict(content, labels=LABELS)
    limit = whole["probabilities"][0] - 1e-6
    assert words.predict(content, labels=LABELS, threshold=limit)["labels"] == whole["labels"][:1]
    assert words.predict(content, labels=LABELS, threshold=1)["labels"] == []


def test_long_labels_are_cut_and_counted(words, captions):
    content = (captions.parent / "blue-bar-0.png").read_bytes()
    assert "cut" not in words.post("/predict", content, labels=LABELS).json()
    assert words.post("/predict", content, labels=f"{LABELS},{'a very ' * 50}long label").json()["cut"] == 1


def test_what_speaks_for_a_word(words, captions):
    content = (captions.parent / "blue-bar-0.png").read_bytes()
    answer = words.post("/explain", content, method="relevance", labels=LABELS, target="a blue bar")
    assert answer.status_code == 200
    assert answer.json()["target"] == "a blue bar"
    assert np.array(answer.json()["map"]).shape == (4, 4)


def test_labels_that_are_missing_or_not_wanted(words, captions):
    content = (captions.parent / "blue-bar-0.png").read_bytes()
    for given, message in (({}, "There are no labels to choose from"), ({"labels": "a,a"}, "Labels must differ")):
        answer = words.post("/predict", content, **given)
        assert answer.status_code == 422
        assert message in answer.json()["error"]["message"]
    answer = words.post("/predict", content, model="digits", labels="cat")
    assert answer.status_code == 422
    assert "cannot read words" in answer.json()["error"]["message"]
