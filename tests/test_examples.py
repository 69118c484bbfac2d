"""The examples run as they stand, small, and what they make has learnt something."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("plain_runs", "own_models")

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs an example in this process, and returns what it prints."""

    def run(name: str, *words: object) -> str:
        monkeypatch.setattr(sys, "argv", [name, "--out", str(tmp_path), *map(str, words)])
        capsys.readouterr()
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_multilabel(run):
    said = run("multilabel.py", "--images", 240, "--epochs", 3)
    assert float(re.search(r"^mAP ([\d.]+)%", said).group(1)) > 75  # by chance 50
    assert len(re.findall(r"average precision", said)) == 4
    assert len(re.findall(r"\.png (nothing|\w+)", said)) == 5


def test_regression(run):
    said = run("regression.py", "--images", 240, "--epochs", 4)
    assert float(re.search(r"^mean R2 ([-\d.]+)", said).group(1)) > 0.5  # the mean alone reaches 0
    assert len(re.findall(r"MAE", said)) == 3
    assert len(re.findall(r"\.png x [\d.-]+, y [\d.-]+, diameter [\d.-]+", said)) == 5


def test_segment(run, tmp_path):
    said = run("segment.py", "--images", 48, "--epochs", 4)
    assert float(re.search(r"^mIoU ([\d.]+)%", said).group(1)) > 35  # all ground: about 27
    assert len(re.findall(r"IoU [\d.]+%, Dice", said)) == 3
    assert (tmp_path / "new_overlay.png").exists()


def test_research(run, tmp_path):
    said = run("research.py", "--images", 300, "--epochs", 3)
    own, vit = (float(re.search(rf"^{name}: top-1 ([\d.]+)%", said, re.M).group(1)) for name in ("own", "vit"))
    assert own > 75  # by chance 50
    assert vit > 40
    assert len(re.findall(r"^image \d (?:disc|ring) \d+%", said, re.M)) == 3
    assert (tmp_path / "comparison.html").exists()


def test_photos(run, monkeypatch):
    monkeypatch.setattr("vitrail.explain.subject.PICTURES", 1)
    said = run("photos.py", "--images", 60, "--epochs", 1)
    assert "copy of 0.jpg" in said
    assert "balanced accuracy" in said
    assert re.search(r"new\.jpg (poppy \d+%|not sure)", said)
    assert "lost.jpg no such file" in said


def test_from_other_tools(run):
    said = run("from_other_tools.py", "--epochs", 1)
    for answer in ("use vitrail.create(NAME)", "It is called 'lr' here.", "amp='fp16'", "bit_r50x1"):
        assert answer in said
    assert "ViT (224, 224)" in said
    assert float(re.search(r"after one more epoch: top-1 ([\d.]+)%", said).group(1)) > 50  # by chance 10


def test_detect(run):
    said = run("detect.py", "--images", 64, "--epochs", 8)
    assert float(re.search(r"^AP50 ([\d.]+)%", said).group(1)) > 30
    assert len(re.findall(r"^(?:disc|square) +AP50", said, re.M)) == 2
    assert len(re.findall(r"\.png (?:\(no object\)|\d+ \w+)", said)) == 3


def test_words(run):
    said = run("words.py", "--images", 100, "--epochs", 1)
    assert re.search(r"^captions found: [\d.]+% among the first 5", said)
    assert len(re.findall(r"a red circle left of a blue square: \S+\.png -?[\d.]+", said)) == 3
    assert re.search(r"\.png shows a (red circle|green bar|yellow triangle) \(\d+%\)", said)
