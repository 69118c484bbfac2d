"""What a run says about the epoch that it kept."""

from __future__ import annotations

import pytest

from vitrail.data.preprocess import Preprocess
from vitrail.tasks import Multiclass, Regression, Task, task_type
from vitrail.train.summary import kept_epoch
from vitrail.weights.card import Architecture, Card


@pytest.mark.parametrize(
    ("task", "scores", "kept", "text"),
    [
        (Multiclass(), [0.5, 0.9], 2, "epoch 2 of 2: top-1 90.0%, the best"),
        (Multiclass(), [0.9, 0.5], 1, "epoch 1 of 2: top-1 90.0%, the best"),
        (Multiclass(), [0.9, 0.8, 0.9], 3, "epoch 3 of 3: top-1 90.0%, the best"),
        (
            Multiclass(),
            [0.5, 0.9, 0.89],
            3,
            "epoch 3 of 3: top-1 89.0%, within one standard error of the best (90.0%, epoch 2)",
        ),
        (
            Regression(),
            [-1.0, 0.91, 0.9, -2.0],
            3,
            "epoch 3 of 4: R² 0.9, within one standard error of the best (0.91, epoch 2)",
        ),
        (task_type("mae")(), [0.9, 0.5, 0.7], 3, "epoch 3, the last"),
    ],
)
def test_the_kept_epoch_and_the_reason(task: Task, scores: list[float], kept: int, text: str):
    rows = [{"epoch": float(i), f"val_{task.measures[0].name}": score} for i, score in enumerate(scores, 1)]
    card = Card(
        model="", config=Architecture("", {}), task=task, preprocess=Preprocess((8, 8), 1), metrics={"epoch": kept}
    )
    assert kept_epoch(card, rows) == text
