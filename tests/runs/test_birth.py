"""The creation and replacement of a run folder: it appears with its configuration or not at all."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from privileges import unprivileged

import vitrail
from vitrail.config import TrainConfig, override
from vitrail.errors import UserError
from vitrail.files import locked
from vitrail.runs.run import Run


@pytest.fixture
def config(trained: Path, tmp_path: Path) -> TrainConfig:
    return override(Run(trained).config, {"out": str(tmp_path), "name": "run"})


@pytest.mark.parametrize("left", ["nothing", "an empty configuration"])
def test_what_a_killed_creation_left_is_no_obstacle(config, tmp_path, left):
    (tmp_path / "run").mkdir()
    if left != "nothing":
        (tmp_path / "run" / "config.yaml").touch()
    with pytest.raises(UserError, match=r"is not a run: it has no config\.yaml"):
        Run.open(tmp_path / "run")
    assert Run.create(config).config == config
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_an_existing_run_is_replaced_only_on_request_and_never_while_it_is_trained(config, tmp_path):
    run = Run.create(config)
    (run / "train.log").touch()
    with pytest.raises(UserError, match=r"exists\. Choose another --name, continue it with"):
        Run.create(config)
    with locked(run.path), pytest.raises(UserError, match="already training"):
        Run.create(config, overwrite=True)
    assert (run / "train.log").exists()
    assert not (Run.create(config, overwrite=True) / "train.log").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_run_in_training_is_not_resumed_by_a_second_process(trained, tmp_path):
    run = shutil.copytree(trained, tmp_path / "run")
    code = """
import fcntl, os, sys
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print(os.getpid(), file=file, flush=True)
print("locked", flush=True)
sys.stdin.read()
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-S", "-c", code, str(run / ".lock")], **pipes) as other:
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(UserError, match=rf"Another process, pid {other.pid}, is training .*run\. Wait for it"):
            vitrail.train(resume=run)
        other.stdin.close()


def test_other_folders_are_not_replaced(config, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").touch()
    for overwrite, message in ((False, "exists"), (True, "is not a vitrail run, so --overwrite does not replace it")):
        with pytest.raises(UserError, match=message):
            Run.create(config, overwrite)
    assert (tmp_path / "run" / "thesis.tex").exists()


def test_a_read_only_folder(config, tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="cannot be created: Permission denied"):
        unprivileged(Run.create, config)
    tmp_path.chmod(0o700)
