"""Every image is held out in exactly one fold, every fold is a run, and together they go on as runs do."""

from __future__ import annotations

import csv
import json
import shutil
import statistics
from pathlib import Path

import numpy as np
import pytest
from stopping import interrupted

import vitrail
from vitrail.cli import main
from vitrail.config import TrainConfig, load_yaml
from vitrail.data import open_data
from vitrail.data.holdout import cut_folds
from vitrail.errors import UserError
from vitrail.tasks import Multiclass

pytestmark = pytest.mark.usefixtures("plain_runs")


def words(run, small):
    flags = [str(word) for name, value in small.items() for word in (f"--{name.replace('_', '-')}", value)]
    place = ["--out", str(run.parent), "--name", run.name, "--save-minutes", "0"]
    return ["train", "digits", "--folds", "3", *flags, *place]


@pytest.fixture(scope="module")
def straight(tmp_path_factory, small):
    """Three folds of digits that nothing interrupted. For reading only."""
    run = tmp_path_factory.mktemp("folds") / "cv"
    with pytest.raises(SystemExit) as ended:
        main(words(run, small))
    assert ended.value.code == 0
    return run


@pytest.mark.parametrize("folds", [2, 3, 7])
def test_folds_are_even_in_size_and_in_every_class(folds):
    targets = np.random.default_rng(0).permutation(np.repeat([0, 1, 2], [50, 8, 3]))
    numbers = cut_folds(Multiclass(), targets, folds, seed=0)
    assert set(numbers.tolist()) == set(range(1, folds + 1))
    assert np.ptp(np.bincount(numbers)[1:]) <= 1
    for label in range(3):
        assert np.ptp(np.bincount(numbers[targets == label], minlength=folds + 1)[1:]) <= 1
    assert np.array_equal(numbers, cut_folds(Multiclass(), targets, folds, seed=0))
    assert not np.array_equal(numbers, cut_folds(Multiclass(), targets, folds, seed=1))


def test_every_image_is_held_out_once_and_test_stays_test(tmp_path):
    x = np.arange(40, dtype=np.uint8)[:, None, None] * np.ones((1, 4, 4), np.uint8)
    y = np.arange(40) % 2
    path = tmp_path / "set.npz"
    np.savez(path, x_train=x[:24], y_train=y[:24], x_val=x[24:30], y_val=y[24:30], x_test=x[30:], y_test=y[30:])
    held = []
    for fold in (1, 2, 3):
        splits = open_data(path, folds=3, fold=fold).splits
        train, val, test = ({int(image[0, 0, 0]) for image in splits[s].pixels} for s in ("train", "val", "test"))
        assert train | val == set(range(30))
        assert not train & val
        assert test == set(range(30, 40))
        held += sorted(val)
    assert sorted(held) == list(range(30))


def test_folds_that_cannot_be(tmp_path):
    for settings, words in (
        ({"folds": 1}, "'folds' must be 2 or more"),
        ({"folds": 3, "fold": 4}, "'fold' from 1 to 'folds'"),
        ({"fold": 2}, "'fold' must be between 0 and the number of folds"),
        ({"folds": 2000}, "too few for 2000 folds"),
    ):
        with pytest.raises(UserError, match=words):
            vitrail.train("digits", out=tmp_path, **settings)
    np.savez(tmp_path / "one.npz", images=np.zeros((5, 4, 4), np.uint8), labels=np.array([0, 0, 0, 0, 1]))
    with pytest.raises(UserError, match=r"'1' has only one image in .*"):
        vitrail.train(tmp_path / "one.npz", out=tmp_path, folds=2)
    assert [path.name for path in tmp_path.iterdir()] == ["one.npz"]


def test_the_folder_holds_a_run_for_every_fold_and_their_mean(straight):
    document = json.loads((straight / "folds.json").read_text())
    assert list(document["folds"]) == ["1", "2", "3"]
    scores = []
    for number, fold in document["folds"].items():
        config = load_yaml(TrainConfig, straight / f"fold{number}" / "config.yaml")
        assert (config.source.folds, config.source.fold) == (3, int(number))
        (file,) = (straight / f"fold{number}").glob("evaluation/*/metrics.json")
        metrics = json.loads(file.read_text())
        assert metrics["images"] == 599  # of 1797
        assert fold["val_top1"] == metrics["top1"]
        scores.append(metrics["top1"])
    assert document["mean"]["val_top1"] == pytest.approx(np.mean(scores))
    assert document["std"]["val_top1"] == pytest.approx(np.std(scores, ddof=1))
    with (straight / "folds.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["fold"] for row in rows] == ["1", "2", "3", "mean", "std"]
    assert float(rows[3]["val_top1"]) == statistics.fmean(scores)


def test_a_fold_is_evaluated_on_the_images_that_it_did_not_learn(straight, tmp_path):
    for number in (1, 2):
        metrics = vitrail.evaluate(straight / f"fold{number}", out=tmp_path)
        assert (
            metrics.summary()["top1"]
            == json.loads((straight / "folds.json").read_text())["folds"][str(number)]["val_top1"]
        )


def test_folds_that_were_stopped_go_on_and_end_the_same(straight, tmp_path, small, vitrail_says, caplog):
    caplog.set_level("INFO", "vitrail")
    run = tmp_path / "cv"
    with interrupted("fold2/last/state.pt"):
        code, *_ = vitrail_says(*words(run, small))
    assert code == 130
    assert f"vitrail train --resume {run}\n" in caplog.text
    assert list(json.loads((run / "folds.json").read_text())["folds"]) == ["1"]
    first = (run / "fold1" / "model.safetensors").stat().st_mtime_ns

    vitrail.train(resume=run)
    assert (run / "folds.json").read_text() == (straight / "folds.json").read_text()
    for number in (1, 2, 3):
        ours, theirs = (folder / f"fold{number}" / "model.safetensors" for folder in (run, straight))
        assert ours.read_bytes() == theirs.read_bytes()
    assert (run / "fold1" / "model.safetensors").stat().st_mtime_ns == first


def test_a_fold_that_was_killed_at_birth_is_begun_again(straight, tmp_path):
    run = Path(shutil.copytree(straight, tmp_path / "cv"))
    shutil.rmtree(run / "fold3")
    (run / "fold3").mkdir()
    (run / "fold3" / "config.yaml").touch()
    document = json.loads((run / "folds.json").read_text())
    del document["folds"]["3"]
    (run / "folds.json").write_text(json.dumps(document))
    vitrail.train(resume=run)
    assert (run / "folds.json").read_text() == (straight / "folds.json").read_text()


def test_one_fold_alone_is_an_ordinary_run_with_its_test_images(tmp_path, tiny):
    images, labels = (np.concatenate([part] * 8) for part in (np.eye(8, dtype=np.uint8)[:, None] * 200, np.arange(8)))
    pixels = np.repeat(images, 8, axis=1)
    path = tmp_path / "set.npz"
    np.savez(path, x_train=pixels, y_train=labels, x_test=pixels[:16], y_test=labels[:16])
    run = vitrail.train(path, out=tmp_path, name="second", folds=2, fold=2, **(tiny | {"batch_size": 16}))
    assert (run / "model.safetensors").exists()
    assert {file.name for file in (run / "evaluation").iterdir()} == {"set-val", "set-test"}
    assert not (run / "folds.json").exists()
