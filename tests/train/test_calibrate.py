"""A finished run has calibrated probabilities, and every verb gives them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import vitrail
from vitrail.runs.run import Run
from vitrail.tasks import Multiclass
from vitrail.tasks.calibration import fit_temperature

pytestmark = pytest.mark.usefixtures("plain_runs")


def outputs(run: Path) -> np.ndarray:
    return np.load(Run(run).outputs_file("digits", "val"))["outputs"]


def test_the_temperature_is_fitted_to_the_validation_images_of_the_kept_model(trained, tmp_path):
    card, labels = Run(trained).card, Run(trained).data().splits["val"].targets
    assert card.task.temperature == fit_temperature(outputs(trained), labels) != 1
    scores, history = vitrail.evaluate(trained, out=tmp_path), Run(trained).history
    kept = history[int(card.metrics["epoch"]) - 1]
    assert scores.top1 == pytest.approx(kept["val_top1"])
    assert scores.loss < kept["val_loss"]  # of uncalibrated probabilities
    assert scores.ece < scores.unscaled_ece
    assert scores.summary().items() <= card.metrics.items()
    assert 0 < card.metrics["crossfitted_ece"] < scores.unscaled_ece
    log = (trained / "train.log").read_text()
    assert f"Kept epoch {card.metrics['epoch']} of 2: top-1 {scores.top1:.1%}" in log
    assert f"Temperature {card.task.temperature:.2f}, fitted to 359 validation images" in log
    assert "before scaling" in log


def test_predictions_are_calibrated(trained):
    task, image = Run(trained).card.task, Run(trained).data().splits["val"].image(0)
    (answer,) = vitrail.Predictor(trained)(image, top=10)
    scaled, plain = (t.means(outputs(trained)[:1])[0] for t in (task, Multiclass(task.classes)))
    assert sorted(answer.probabilities) == pytest.approx(sorted(scaled), rel=1e-4)
    assert answer.probabilities[0] != pytest.approx(plain.max(), rel=1e-3)


def test_fitting_again_gives_the_same_and_calibrates_older_runs(trained, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    before = (run / "model.json").read_bytes()
    vitrail.train(resume=run)
    assert (run / "model.json").read_bytes() == before
    document = json.loads(before)
    del document["temperature"]
    (run / "model.json").write_text(json.dumps(document))
    assert Run(run).card.task.temperature == 1
    vitrail.train(resume=run)
    assert (run / "model.json").read_bytes() == before


def test_the_temperature_of_other_weights_is_not_taken_over(small, tmp_path):
    for suffix in (".safetensors", ".json"):
        shutil.copy(Path(small["weights"]).with_suffix(suffix), tmp_path)
    card = tmp_path / "model.json"
    card.write_text(json.dumps(json.loads(card.read_text()) | {"temperature": 5.0}))
    run, other = (
        vitrail.train("digits", out=tmp_path / name, **small | {"weights": str(weights)})
        for name, weights in (("a", tmp_path / "model.safetensors"), ("b", small["weights"]))
    )
    assert Run(run).card.task == Run(other).card.task
    assert Run(run).history[0]["val_loss"] == Run(other).history[0]["val_loss"]


def test_other_data_is_measured_with_the_temperature_of_the_run(trained, digits, tmp_path):
    scores = vitrail.evaluate(trained, digits, out=tmp_path)
    assert scores.temperature == Run(trained).card.task.temperature
    assert scores.images == 240
    assert scores.ece != scores.unscaled_ece
