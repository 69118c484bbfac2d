"""Commands whose work processes share: the same results, printed and written once; errors in one sentence."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from distributed.launch import environment, torchrun

import vitrail
from vitrail.errors import UserError
from vitrail.evaluate.embed import write
from vitrail.train.prepare import _check_share
from vitrail.world import World

COMMANDS = Path(__file__).parent / "commands.py"


@pytest.fixture(scope="module")
def shared(trained, digits, small, tmp_path_factory):
    """What two processes write and print, the last of several commands an error of the second process."""
    out = tmp_path_factory.mktemp("shared")
    settings = [f"--{name.replace('_', '-')}={value}" for name, value in small.items()]
    commands = [
        ["evaluate", trained, "--out", out / "evaluation", "--batch-size", "50"],
        ["evaluate", trained, "digits", "--method", "knn", "--out", out / "knn"],
        ["predict", trained, digits, "--out", out / "predictions.csv", "--batch-size", "7"],
        ["embed", trained, digits, "--out", out / "features.parquet"],
        ["embed", trained, digits, "--out", out / "features.npz"],
        ["models", "vit_nano4"],
        ["train", "digits", "--out", out, *settings],
    ]
    (out / "commands.json").write_text(json.dumps([[str(word) for word in words] for words in commands]))
    command = torchrun(2, str(COMMANDS), str(out / "commands.json"))
    return out, subprocess.run(command, env=environment(FAILS="1"), capture_output=True, text=True, timeout=300)


def test_evaluations_are_those_of_one_process(shared, trained, tmp_path):
    out, _ = shared
    vitrail.evaluate(trained, out=tmp_path / "alone", engine="torch")
    ours, theirs = (json.loads((f / "metrics.json").read_text()) for f in (out / "evaluation", tmp_path / "alone"))
    assert ours["images"] == theirs["images"]
    assert ours["top1"] == theirs["top1"]
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    knn = vitrail.evaluate(trained, "digits", method="knn", out=tmp_path / "knn", engine="torch")
    assert json.loads((out / "knn" / "metrics.json").read_text())["top1"] == pytest.approx(knn.top1, abs=1e-3)


def test_predictions_are_in_order(shared, trained, digits):
    lines = (shared[0] / "predictions.csv").read_text().splitlines()[1:]
    alone = list(vitrail.predict(trained, str(digits), engine="torch"))
    assert [line.split(",")[:2] for line in lines] == [[each.file, each.labels[0]] for each in alone]


def test_vectors_are_written_in_parts_or_merged(shared, trained, digits, tmp_path):
    write(vitrail.embed(trained, str(digits), engine="torch"), tmp_path / "alone.npz")
    alone, merged = np.load(tmp_path / "alone.npz"), np.load(shared[0] / "features.npz")
    np.testing.assert_array_equal(merged["files"], alone["files"])
    np.testing.assert_allclose(merged["features"], alone["features"], atol=1e-5)
    assert len([*(shared[0] / "features.parquet").iterdir()]) == 2
    table = pyarrow.parquet.read_table(shared[0] / "features.parquet")
    assert table["file"].to_pylist() == alone["files"].tolist()
    assert not [*shared[0].glob(".*.parts")]


def test_results_are_printed_once(shared):
    for line, times in {"top-5 ": 2, "vectors of length 128 are in": 2, "vit_nano4  ": 1}.items():
        assert shared[1].stdout.count(line) == times, line


def test_an_error_is_one_sentence_once(shared):
    said = [line for line in shared[1].stderr.splitlines() if line.startswith("vitrail: ")]
    assert said == ["vitrail: An image of this process cannot be read."]
    assert "Traceback" not in shared[1].stderr.partition("torch/distributed/elastic")[0]


@pytest.mark.parametrize(
    ("images", "passes", "way_out"),
    [(63, 1, "--batch-size 62 or 64"), (66, 2, "--batch-size 64 or 68"), (1, 1, "at least 2 images")],
)
def test_a_batch_that_processes_cannot_share_is_refused(images, passes, way_out, monkeypatch):
    monkeypatch.setattr(World, "size", 2)
    _check_share(64, passes)
    with pytest.raises(UserError, match=rf"Each of the 2 processes gets the same share.*{way_out}"):
        _check_share(images, passes)
