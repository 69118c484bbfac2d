"""Verbs by hand: what they print, as text, tables and JSON."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
from pathlib import Path

import pytest

import vitrail
from vitrail.config import TrainConfig, from_plain, load_yaml
from vitrail.train.recipes import RECIPES
from vitrail.verbs.recipes import recipes


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """Whatever is left behind is left here."""
    monkeypatch.chdir(tmp_path)


def test_models_as_a_table_and_as_json(vitrail_says):
    code, out, _ = vitrail_says("models", "vit_nano")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["model", "vit_nano2", "vit_nano4", "vit_nano8"]

    code, out, _ = vitrail_says("models", "vit_nano4", "--json")
    (row,) = json.loads(out)
    assert code == 0
    assert row["name"] == "vit_nano4"
    assert row["params"] == sum(p.numel() for p in vitrail.create("vit_nano4").parameters())
    assert (row["tokens"], row["img_size"]) == (64, [32, 32])


def test_training_evaluating_and_predicting_by_hand(vitrail_says, digits):
    words = ["--model", "vit_nano4", "--img-size", 8, "--epochs", 1, "--stem", "patch", "--name", "first"]
    assert vitrail_says("train", digits, *words)[0] == 0
    assert vitrail_says("evaluate", "runs/first")[0] == 0
    code, out, _ = vitrail_says("predict", "runs/first", digits / "3")
    assert code == 0
    assert len(out.splitlines()) == len(list((digits / "3").iterdir()))
    assert vitrail_says("train", "--resume", "runs/first")[0] == 0


def test_evaluate_as_a_table_and_as_json(vitrail_says, trained):
    code, out, _ = vitrail_says("evaluate", trained, "--out", "there")
    assert code == 0
    assert "top-1" in out
    assert "there" in out
    assert {path.name for path in Path("there").iterdir()} >= {"metrics.json", "confusion.png", "confusion.csv"}

    code, out, _ = vitrail_says("evaluate", trained, "--out", "there", "--json")
    numbers = json.loads(out)
    assert code == 0
    assert numbers["images"] == 359
    assert numbers["top1"] == json.loads((trained / "model.json").read_text())["metrics"]["top1"]
    assert len(numbers["per_class"]) == len(numbers["confusion"]) == 10


def test_predict_in_every_format(vitrail_says, trained, digits):
    files = [str(path) for path in sorted((digits / "7").iterdir())[:3]]

    code, out, _ = vitrail_says("predict", trained, *files, "--format", "json", "--top", 2)
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [line["file"] for line in lines] == files
    assert all(len(line["labels"]) == len(line["probabilities"]) == 2 for line in lines)

    code, out, _ = vitrail_says("predict", trained, *files, "--format", "csv", "--top", 2)
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0
    assert [row["file"] for row in rows] == files
    assert [row["label"] for row in rows] == [line["labels"][0] for line in lines]

    code, out, _ = vitrail_says("predict", trained, *files)
    assert code == 0
    assert [line.split()[:2] for line in out.splitlines()] == [[line["file"], line["labels"][0]] for line in lines]


@pytest.mark.parametrize("end", ["csv", "json", "txt"])
def test_predictions_of_files_whose_names_are_not_text(vitrail_says, trained, digits, tmp_path, end):
    name = os.fsdecode(b"bad\xff.png")
    shutil.copy(next((digits / "7").iterdir()), tmp_path / name)
    code, _, error = vitrail_says("predict", trained, tmp_path / name, "--out", f"a.{end}")
    assert code == 0, error
    assert "udcff.png" in Path(f"a.{end}").read_text()


def test_predict_goes_on_after_a_bad_file_and_exits_1(vitrail_says, trained, digits):
    good = next((digits / "0").iterdir())
    Path("bad.png").write_bytes(good.read_bytes()[:50])
    code, out, _ = vitrail_says("predict", trained, good, "bad.png", good, "--format", "json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 1
    assert [line["file"] for line in lines] == [str(good), "bad.png", str(good)]
    assert [bool(line["error"]) for line in lines] == [False, True, False]


def test_features_are_measured_by_every_method(vitrail_says, trained):
    code, out, _ = vitrail_says("evaluate", trained, "--method", "knn", "--k", 5, "--out", "knn")
    assert code == 0
    assert "k 5" in out
    assert "top-1" in out
    assert {path.name for path in Path("knn").iterdir()} == {
        "metrics.json",
        "confusion.png",
        "confusion.csv",
        "per_class.csv",
    }

    words = ["--method", "fewshot", "--shots", 1, 3, "--draws", 2, "--seed", 4, "--out", "few", "--json"]
    code, out, _ = vitrail_says("evaluate", trained, *words)
    assert code == 0
    assert [(row["shots"], len(row["top1"])) for row in json.loads(out)["shots"]] == [(1, 2), (3, 2)]
    assert {path.name for path in Path("few").iterdir()} == {"metrics.json", "shots.csv", "shots.png"}


def test_embed_goes_on_after_a_bad_file_and_exits_1(vitrail_says, trained, digits):
    files = sorted((digits / "0").iterdir())[:2]
    Path("bad.png").write_bytes(b"")
    code, out, _ = vitrail_says("embed", trained, files[0], "bad.png", files[1], "--out", "f.npz")
    assert code == 1
    assert out.splitlines() == ["bad.png  — unreadable: empty file", "2 vectors of length 128 are in f.npz"]
    assert vitrail_says("embed", trained, *files, "--out", "f.npz")[0] == 0


def test_recipes_as_a_list_and_one_with_all_its_values(vitrail_says):
    code, out, _ = vitrail_says("recipes")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == list(RECIPES)
    code, out, _ = vitrail_says("recipes", "deit", "--name=x")
    assert code == 0
    assert "  name: x\n" in out
    code, out, _ = vitrail_says("recipes", "--json")
    assert json.loads(out) == recipes()

    code, out, _ = vitrail_says("recipes", "deit", "--model", "ViT-S/16", "--epochs", 40)
    assert code == 0
    assert "no data was given" in out
    Path("config.yaml").write_text(out)
    config = load_yaml(TrainConfig, Path("config.yaml"))
    assert config == recipes("deit", model="vit_s16", epochs=40)
    assert (config.model, config.optim.epochs, config.optim.warmup_epochs) == ("vit_s16", 40, 5.0)

    code, out, _ = vitrail_says("recipes", "small", "digits", "--json")
    assert code == 0
    assert from_plain(TrainConfig, json.loads(out)) == recipes("small", "digits")
    assert json.loads(out)["input"]["img_size"] == [8, 8]
    assert sorted(Path.cwd().iterdir()) == [Path.cwd() / "config.yaml"]
