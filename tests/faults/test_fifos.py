"""A FIFO named like an image waits for a writer for ever, so no verb may open it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("plain_runs")

VERBS = {  # exit code by command
    "check images": 1,
    "predict RUN images": 1,
    "predict RUN images/0/fifo.png": 1,
    "embed RUN images --out new.npz": 1,
    "explain RUN images/0/fifo.png --out new": 2,
    "explain RUN --data images --out new": 2,  # more than one image in a hundred
    "train images --model vit_nano4 --img-size 8 --epochs 1 --out new": 2,
}


@pytest.fixture
def _images(tmp_path: Path, digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures of two classes in the current folder, and among them a FIFO."""
    for name in "01":
        shutil.copytree(digits / name, tmp_path / "images" / name)
    os.mkfifo(tmp_path / "images" / "0" / "fifo.png")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_images")
@pytest.mark.parametrize("words", VERBS)
def test_verbs_name_a_fifo(words, trained, vitrail_says, caplog):
    code, out, error = vitrail_says(*(trained if word == "RUN" else word for word in words.split()))
    said = out + error + caplog.text
    assert code == VERBS[words], said
    assert "fifo.png" in said
    assert "not a regular file" in said
