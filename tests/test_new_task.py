"""A new task is one file, `touch/ordinal.py`, which no file of the package knows: it goes the whole way."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from stopping import copied
from touch.ordinal import Ordinal

import vitrail
from vitrail import tasks
from vitrail.errors import UserError

pytestmark = pytest.mark.usefixtures("run", "plain_runs")  # only `run` has figures and a report

LEVELS = ("0 dark", "1 dim", "2 bright", "3 white")


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    tasks.register(Ordinal)
    yield
    del tasks.TASKS["ordinal"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """240 noisy images, whose level is about their brightness."""
    rng = np.random.default_rng(0)
    levels = np.arange(240) % len(LEVELS)
    brightness = 40 + 55 * levels + rng.normal(0, 20, 240)  # so that neighbouring levels overlap
    images = rng.normal(brightness[:, None, None], 25, (240, 8, 8)).clip(0, 255).astype(np.uint8)
    path = tmp_path_factory.mktemp("data") / "levels.npz"
    np.savez(path, images=images, labels=np.array(LEVELS)[levels])
    return path


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three epochs of 12 steps, and beside it what a kill in the second one would have left."""
    settings = {"model": "vit_nano4", "stem": "patch", "epochs": 3, "lr": 3e-3, "model_ema": 0.9, "save_minutes": 0.0}
    out = tmp_path_factory.mktemp("runs")
    with copied(out / "run", out / "killed", "state.pt", 14):
        return vitrail.train(data, task="ordinal", out=out, name="run", **settings)


def test_it_learns_and_is_kept_with_its_name(run):
    card = json.loads((run / "model.json").read_text())
    assert (card["task"], card["classes"], card["config"]["classes"]) == ("ordinal", list(LEVELS), 3)
    rows = list(csv.DictReader((run / "metrics.csv").read_text().splitlines()))
    assert rows[0].keys() >= {"train_loss", "val_loss", "val_mae", "val_top1"}
    best = min(float(row["val_mae"]) for row in rows)
    assert card["metrics"]["mae"] == pytest.approx(best, abs=1e-6)
    assert best < 0.6  # a guess in the middle is 1 off on average


def test_it_is_killed_and_resumes_to_the_bit(run):
    killed = run.path.with_name("killed")
    assert len((killed / "metrics.csv").read_text().splitlines()) == 2
    vitrail.train(resume=killed)
    theirs, ours = (vitrail.load(folder).state_dict() for folder in (killed, run))
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)


def test_it_is_evaluated(run, data):
    scores = vitrail.evaluate(run)
    assert scores.summary().keys() >= {"mae", "top1", "loss"}
    assert (scores.folder / "confusion.png").exists()
    assert (scores.folder / "per_level.csv").read_text().startswith("level,mae,support")
    assert vitrail.evaluate(run, data).mae == pytest.approx(scores.mae)
    assert 0 < vitrail.evaluate(run, method="knn").top1 <= 1


def test_it_predicts(run, tmp_path):
    from PIL import Image

    Image.new("L", (8, 8), 235).save(tmp_path / "white.png")
    (answer,) = vitrail.predict(run, [tmp_path / "white.png"])
    assert answer.labels[0] == LEVELS[-1]
    assert sum(answer.probabilities) == pytest.approx(1)


def test_it_is_explained(run, data, digits):
    image = digits / "0" / "0.png"
    explained = vitrail.explain(run, [image], data=data)
    drawn = {file.stem.partition("-")[0] for file in explained.files}
    assert {"rollout", "relevance", "map", "wrong", "uncertain", "neighbours"} <= drawn
    assert vitrail.explain(run, [image], target="above 1 dim").files
    with pytest.raises(UserError, match="has no class 'above'"):
        vitrail.explain(run, [image], target="above")


def test_it_is_reported(run):
    page = vitrail.report(run).read_text(encoding="utf-8")
    assert "levels, off by" in page
    assert "Level error" in page


def test_it_is_exported(run):
    proof = vitrail.export(run, no_preprocess=True)  # whose shapes take most of the time
    assert proof.same == proof.images
    (torch_answer,), (onnx_answer,) = (
        list(vitrail.Predictor(source)(np.full((8, 8), 90, np.uint8))) for source in (run, proof.file)
    )
    assert onnx_answer.labels == torch_answer.labels
    assert onnx_answer.probabilities == pytest.approx(torch_answer.probabilities, abs=1e-4)


def test_it_teaches(run, data, tmp_path):
    settings = {"model": "vit_nano4", "stem": "patch", "epochs": 1, "out": tmp_path, "name": "student"}
    student = vitrail.train(data, task="ordinal", teacher=str(run), distill="soft", **settings)
    assert json.loads((student / "model.json").read_text())["teacher"]["metrics"]["mae"] < 0.6


def test_without_its_file_a_run_says_so(run, monkeypatch):
    monkeypatch.delitem(tasks.TASKS, "ordinal")
    with pytest.raises(
        UserError, match="must be one of multiclass, multilabel, regression, masks, boxes, pairs, but it is 'ordinal'"
    ):
        vitrail.load(run)
