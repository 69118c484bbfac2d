"""A run's clock and what it counts, across checkpoints."""

from __future__ import annotations

import time

import numpy as np
import pytest
from measuring import measure

from vitrail.train.progress import Progress


def test_the_share_of_time_without_data_is_that_of_the_epoch_across_a_pause():
    progress = Progress(trained=0.5, waited=0.1)
    with progress.waiting():
        time.sleep(0.1)
    state, progress = progress.state_dict(), Progress()
    progress.load_state_dict(state)
    progress.trained += 0.5
    metrics = measure(np.eye(3, dtype=np.float32), np.arange(3), ("a", "b", "c"))
    progress.close_epoch(metrics)
    progress.close_epoch(metrics)
    assert 0.2 <= progress.rows[0]["wait"] < 0.5
    assert progress.rows[1]["wait"] == 0


def test_a_step_counts_its_values_and_its_time():
    progress = Progress()
    progress.tick()
    time.sleep(0.05)
    progress.add({"loss": 2.0})
    progress.add({"loss": 1.0})
    assert (progress.step, progress.count, progress.mean("loss")) == (2, 2, 1.5)
    assert progress.took < 0.05 <= progress.trained == pytest.approx(progress.seconds, abs=0.01)


def test_a_state_of_something_else_is_refused():
    with pytest.raises(TypeError):
        Progress().load_state_dict({"steps": 3})
