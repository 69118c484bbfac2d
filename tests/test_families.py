"""Every family goes the whole way: it trains, resumes, explains, converts and exports by the same commands."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import vitrail
from vitrail import models
from vitrail.train.checkpoint import checkpoint_path
from vitrail.weights import open_run

FAMILIES = [*models.FAMILIES, "deit"]


@pytest.fixture(scope="module", params=FAMILIES)
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    """A family, its run of two epochs of digits, and what a kill after the first epoch would have left of that."""
    folder = tmp_path_factory.mktemp(request.param)
    killed = folder / "killed"
    replace = Path.replace

    def watched(source: Path, target: Path) -> Path:
        replaced = replace(source, target)
        if target == checkpoint_path(folder / "run") and not killed.exists():
            shutil.copytree(folder / "run", killed)
        return replaced

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "replace", watched)
        run = vitrail.train("digits", model=request.param, epochs=2, batch_size=128, out=folder, name="run")
    return request.param, run, killed


def test_it_is_what_was_asked_for(finished):
    family, run, _ = finished
    _, card = open_run(run)
    assert models.is_meant(card.model, family)
    assert card.metrics["top1"] > 0.15  # chance is a tenth


def test_it_resumes_to_the_bit(finished):
    _, run, killed = finished
    assert len((killed / "metrics.csv").read_text().splitlines()) == 2
    vitrail.train(resume=killed)
    assert (killed / "model.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()
