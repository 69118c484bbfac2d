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
from vitrail.evaluate.embed import write

COMMANDS = Path(__file__).parent / "commands.py"


def together(tmp_path: Path, *commands: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "commands.json").write_text(json.dumps([[str(word) for word in words] for words in commands]))
    command = torchrun(2, str(COMMANDS), str(tmp_path / "commands.json"))
    return subprocess.run(command, env=environment(**env), capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def shared(trained, digits, tmp_path_factory):
    """What two processes print and write."""
    out = tmp_path_factory.mktemp("shared")
    done = together(
        out,
        ["evaluate", trained, "--out", out / "evaluation", "--batch-size", "50"],
        ["evaluate", trained, "digits", "--method", "knn", "--out", out / "knn"],
        ["predict", trained, digits, "--out", out / "predictions.csv", "--batch-size", "7"],
        ["embed", trained, digits, "--out", out / "features.parquet"],
        ["embed", trained, digits, "--out", out / "features.npz"],
        ["models", "vit_nano4"],
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return out, done.stdout


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
    for line in ("top-5 ", "vectors of length 128 are in", "vit_nano4 "):
        assert shared[1].count(line) == {"vit_nano4 ": 1}.get(line, 2), line


@pytest.mark.parametrize(
    ("words", "env", "sentence"),
    [
        (["--batch-size", "63"], {}, "Each of the 2 processes gets the same share of a batch"),
        ([], {"FAILS": "1"}, "An image of this process cannot be read."),
    ],
)
def test_an_error_is_one_sentence_once(words, env, sentence, tmp_path, small):
    settings = [f"--{name.replace('_', '-')}={value}" for name, value in small.items()]
    done = together(tmp_path, ["train", "digits", "--out", tmp_path, *settings, *words], **env)
    said = [line for line in done.stderr.splitlines() if line.startswith("vitrail: ")]
    assert len(said) == 1, done.stderr
    assert sentence in said[0]
    assert "Traceback" not in done.stderr.partition("torch/distributed/elastic")[0]
