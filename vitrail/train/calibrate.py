"""Calibrates the probabilities of a finished run, on its validation images."""

from __future__ import annotations

from dataclasses import replace

from vitrail.data import Data
from vitrail.evaluate.features import split_scores
from vitrail.runs.predictor import Predictor
from vitrail.runs.run import Run
from vitrail.tasks.scores import rounded
from vitrail.weights.card import write_card
from vitrail.world import world


def calibrate(run: Run, data: Data, *, device: str, workers: int) -> str:
    """Fits the task's calibration, saves it in the model card with the new scores, and returns a line on it.

    Training validates with uncalibrated probabilities. The outputs stay in the run, where `evaluate` finds them.
    """
    predictor = Predictor(run, device, engine="torch")  # as in training
    card = predictor.card
    split = data.read_as(card.preprocess.channels, card.preprocess.bits).splits["val"]
    file = run.outputs_file(data.name, "val")
    _, outputs, _ = split_scores(predictor, split, file, device=device, workers=workers)
    if outputs is None:  # too large for memory
        return ""
    task, measured, line = card.task.calibrated(outputs, split.targets)
    if task is not card.task:
        scores = task.measure(outputs, split.targets)
        metrics = scores.summary() | rounded(measured) | {"epoch": card.metrics["epoch"]}
        calibrated = replace(card, task=task, metrics=metrics)
        world().once(lambda: write_card(run.weights_file.with_suffix(".json"), calibrated))
    return line
