"""A run that was made before tasks, runs and charts had rooms of their own still opens, and goes on where it was.

`old_run` was trained by version 0.1 at commit 4e3b379 from `start.safetensors`, a ViT of 11,290 parameters, and stopped
in its third of four epochs; `whole.csv` holds the metrics of the same run undisturbed.
"""

from __future__ import annotations

import csv
import re
import shutil
from pathlib import Path

import pytest

import vitrail
from vitrail.train.config_file import read_settings

OLD = Path(__file__).parent / "old_run"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    run = tmp_path / "old"
    shutil.copytree(OLD, run)
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("start.safetensors", str(OLD / "start.safetensors")))
    return run


def rows(file: Path) -> list[dict[str, float]]:
    with file.open(newline="") as stream:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(stream)]


def test_it_predicts(old, digits):
    answers = list(vitrail.predict(old, [digits / "0"]))
    assert len(answers) == len(list((digits / "0").iterdir()))
    assert all(len(answer.labels) == 5 for answer in answers)


def test_it_is_evaluated_as_it_was(old):
    scores = vitrail.evaluate(old)
    last = rows(OLD / "metrics.csv")[-1]
    assert scores.top1 == pytest.approx(last["val_top1"])
    assert scores.loss == pytest.approx(last["val_loss"], rel=1e-4)


def test_it_is_reported(old):
    page = vitrail.report(old).read_text(encoding="utf-8")
    assert "Training is not finished" in page
    assert "46.5%" in page


def test_it_resumes_and_ends_as_it_would_have(old):
    vitrail.train(resume=old)
    for row, expected in zip(rows(old / "metrics.csv"), rows(OLD / "whole.csv"), strict=True):
        for name in ("step", "lr", "train_loss", "val_loss"):
            assert row[name] == pytest.approx(expected[name], rel=1e-3), name


def test_its_batch_size_was_that_of_a_forward_pass(old, tmp_path):
    for text in ((old / "config.yaml").read_text(), "batch_size: 32\ngrad_accum_steps: 1\n"):
        images = int(re.findall(r"batch_size: (\d+)", text)[0])
        (tmp_path / "config.yaml").write_text(text.replace("grad_accum_steps: 1", "grad_accum_steps: 4"))
        settings = read_settings(tmp_path / "config.yaml")
        assert (settings["batch_size"], settings["grad_accum"]) == (4 * images, 4)


def test_its_exported_file_predicts_what_it_predicts(old, digits):
    """`exported.onnx` was written at commit 81cfed0, when files read pixels of one size."""
    images = sorted(digits.rglob("*.png"))[::10]
    ours, theirs = (list(vitrail.predict(source, images, top=1)) for source in (old, old / "exported.onnx"))
    assert [answer.labels for answer in ours] == [answer.labels for answer in theirs]
