"""The run folder as an object."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import vitrail
from vitrail import cli
from vitrail.config import override
from vitrail.errors import UserError
from vitrail.runs.run import Run


@pytest.fixture
def config(tmp_path):
    made = vitrail.recipes("small", "digits", epochs=2)
    return override(made, {"out": str(tmp_path), "name": "run"})


def test_a_new_run_has_its_configuration_and_nothing_else(config, tmp_path):
    run = Run.create(config)
    assert run.path == tmp_path / "run"
    assert (run.name, run.exists, run.has_model, run.finished) == ("run", True, False, False)
    assert (run.history, run.evaluations, run.folds) == ([], {}, [])
    assert Run.open(run.path).config == config


def test_a_run_is_replaced_only_if_asked_and_only_by_a_run(config, tmp_path):
    run = Run.create(config)
    run.log_file.touch()
    with pytest.raises(UserError, match=r"The run .*run exists\. Choose another --name, continue it"):
        Run.create(config)
    Run.create(config, overwrite=True)
    assert not run.log_file.exists()
    run.config_file.rename(run.path / "notes.txt")
    with pytest.raises(UserError, match="is not a vitrail run, so --overwrite does not replace it"):
        Run.create(config, overwrite=True)
    with pytest.raises(UserError, match=r"--weights .* is in .*run, the run to create"):
        Run.create(override(config, {"weights": str(tmp_path / "run" / "model.safetensors")}), overwrite=True)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"is not a run: it has no config\.yaml"):
        Run.open(tmp_path)
    with pytest.raises(UserError, match="so its training data is unknown"):
        Run(tmp_path).data()


def test_what_a_run_holds(trained):
    run = Run.open(trained)
    assert [row["epoch"] for row in run.history] == [1, 2]
    assert run.finished
    assert run.evaluations["digits-val"]["top1"] == pytest.approx(run.card.metrics["top1"], abs=1e-6)
    assert run.own_scores() == run.evaluations["digits-val"]
    assert run.model().config == run.card.config
    assert (run.is_own("digits"), run.is_own("mnist")) == (True, False)


def test_the_data_of_a_run_has_its_splits(trained, tmp_path):
    run = Run.open(trained)
    data = run.data(run.card)
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 1438, "val": 359}
    other = shutil.copytree(trained, tmp_path / "run")
    text = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(text.replace("seed: 0", "seed: 1"))
    assert not np.array_equal(Run(other).data().splits["val"].pixels, data.splits["val"].pixels)


def test_data_that_has_lost_a_class_is_refused(digits, small, tmp_path):
    photos = shutil.copytree(digits, tmp_path / "photos")
    run = Run(vitrail.train(photos, out=tmp_path, name="run", **small))
    shutil.rmtree(photos / "7")
    assert len(run.data().classes) == 9
    with pytest.raises(UserError, match="had 10 classes when the run was trained, and has 9: 7 were added or removed"):
        run.data(run.card)


def test_the_scores_of_the_own_images_are_told_from_others(trained, tmp_path):
    run = Run(shutil.copytree(trained, tmp_path / "run"))
    document = run.evaluations["digits-val"]
    other = run.evaluation("others", "val") / "metrics.json"
    other.parent.mkdir()
    other.write_text(json.dumps(document | {"loss": document["loss"] + 1, "top1": 0.0}))
    assert run.own_scores() == document
    own = run.evaluation("digits", "val") / "metrics.json"
    del document["loss"]  # boxes have none
    own.write_text(json.dumps(document))
    assert run.own_scores() == document
    other.write_text(json.dumps(document | {"images": 3}))
    own.unlink()
    assert run.own_scores() is None


def test_the_folds_of_a_cross_validation(config):
    run = Run.create(override(config, {"folds": 3}))
    assert run.has_folds
    assert run.folds == []
    Run.create(override(config, {"folds": 3, "fold": 2, "out": str(run.path), "name": run.fold(2).name}))
    assert [fold.path for fold in run.folds] == [run.path / "fold2"]
    assert not run.folds[0].has_folds


def test_a_run_is_looked_into_without_torch(trained):
    code = f"""
import sys
from pathlib import Path
from vitrail.runs.run import Run
run = Run.open({str(trained)!r})
run.config, run.card, run.history, run.evaluations
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_run_is_a_path(trained):
    run = vitrail.Run(trained)
    assert (Path(run), str(run), run / "model.json") == (trained, str(trained), trained / "model.json")
    assert run == trained == run
    assert run != trained / "last"
    assert {run: 1}[Run(trained)] == 1
    assert Path(run, "model.json").exists()


def test_what_train_returns_answers_for_the_run(trained, digits):
    run = vitrail.Run(trained)
    assert run.scores["top1"] == run.card.metrics["top1"] > 0.5
    assert run.model().config == run.card.config
    image = next(digits.rglob("*.png"))
    assert list(run.predict(image, top=1)) == list(vitrail.predict(run, image, top=1))
    assert run.report_file.exists()  # written by `vitrail.train`
    assert run.report() == run.report_file == vitrail.report(run)


def test_training_ends_with_a_report(tmp_path, small, caplog, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = [str(word) for name, value in small.items() for word in (f"--{name.replace('_', '-')}", value)]
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", "digits", "--name", "run", *flags])
    assert caught.value.code == 0
    assert "The report is runs/run/report.html" in caplog.text
    (tmp_path / "runs/run/report.html").write_text("my own")
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", "--resume", "runs/run"])
    assert caught.value.code == 0  # the run is whole, whatever becomes of its report
    assert "its report failed" in caplog.text
    assert (tmp_path / "runs/run/report.html").read_text() == "my own"
