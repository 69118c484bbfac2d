"""The creation and replacement of a run folder: it appears with its configuration or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from privileges import unprivileged

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
