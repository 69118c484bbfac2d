"""Experiment trackers: wandb offline and mlflow in a folder, through their own clients."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

import vitrail
from vitrail.errors import UserError
from vitrail.train import loggers
from vitrail.train.loggers import check_loggers

pytestmark = pytest.mark.usefixtures("plain_runs")

# In a process of its own: the clients start threads and services that outlive a test.
TRAIN = """
import sys, vitrail
settings = dict(model="vit_nano4", img_size=8, stem="patch", opt="adamw", epochs=1, batch_size=64)
run = vitrail.train("digits", out=sys.argv[1], name="run", log=sys.argv[2], **settings)
vitrail.train(resume=run, epochs=2)
"""


def train(out, log, **environment):
    command = [sys.executable, "-c", TRAIN, out, log]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=True, cwd=out
    )
    return done.stderr


@pytest.mark.skipif(find_spec("mlflow") is None or find_spec("wandb") is None, reason="needs mlflow and wandb")
def test_trackers_get_settings_and_every_epoch_of_a_run_in_one_place(tmp_path):
    mlflow = {"MLFLOW_TRACKING_URI": f"file:{tmp_path / 'mlruns'}", "MLFLOW_ALLOW_FILE_STORE": "true"}
    wandb = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_CACHE_DIR": str(tmp_path / "cache")}
    assert "failed" not in train(tmp_path, "mlflow,wandb,csv", **mlflow, **wandb)
    names = json.loads((tmp_path / "run/trackers.json").read_text())

    (found,) = (tmp_path / "mlruns").glob(f"*/{names['mlflow']}")
    assert (found / "params/batch_size").read_text() == "64"
    lines = (found / "metrics/val_top1").read_text().splitlines()
    assert [line.split()[2] for line in lines] == ["1", "2"]  # also after the run was extended
    assert (found / "metrics/val_macro_f1").exists()

    first, second = sorted((tmp_path / "run").rglob("*.wandb"))  # offline, each process or resumption has a file
    for file in (first, second):
        assert b"val_top1" in file.read_bytes()
        assert names["wandb"].encode() in file.read_bytes()


def test_a_tracker_that_fails_does_not_stop_the_run(tiny, tmp_path, monkeypatch, caplog):
    class Broken:
        id = "x"

        def __init__(self, *_):
            pass

        def epoch(self, *_):
            raise OSError("no network")

        def close(self, *_):
            raise AssertionError("is not asked again")

    monkeypatch.setitem(loggers.LOGGERS, "mlflow", Broken)
    monkeypatch.setattr(loggers, "find_spec", lambda _: True)
    run = vitrail.train("digits", out=tmp_path, name="run", log="mlflow", **tiny)
    assert "--log mlflow failed, and the run goes on without it: no network." in caplog.text
    assert (run / "model.safetensors").exists()


def test_what_can_be_logged_to(monkeypatch, trained):
    check_loggers(("csv", "tensorboard"))  # always written
    with pytest.raises(UserError, match=r"'log' must be among wandb, mlflow, csv, tensorboard, but it is 'comet'."):
        check_loggers(("comet",))
    monkeypatch.setattr(loggers, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"--log wandb needs the package wandb: pip install 'vitrail\[wandb\]'"):
        vitrail.train("digits", log="wandb")
    assert not (trained / "trackers.json").exists()
