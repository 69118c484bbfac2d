"""A run's clock and what it counts, across checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
from measuring import measure

from vitrail.train.progress import Progress


@pytest.fixture
def pause(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets time pass for `Progress`, and nothing else does."""
    clock = [100.0]
    monkeypatch.setattr("vitrail.train.progress.time", SimpleNamespace(monotonic=lambda: clock[0]))

    def wait(seconds: float) -> None:
        clock[0] += seconds

    return wait


def test_the_share_of_time_without_data_is_that_of_the_epoch_across_a_pause(pause):
    progress = Progress(trained=0.5, waited=0.1)
    with progress.waiting():
        pause(0.1)
    state, progress = progress.state_dict(), Progress()
    progress.load_state_dict(state)
    progress.trained += 0.5
    metrics = measure(np.eye(3, dtype=np.float32), np.arange(3), ("a", "b", "c"))
    progress.close_epoch(metrics)
    progress.close_epoch(metrics)
    assert progress.rows[0]["wait"] == pytest.approx(0.2)
    assert progress.rows[1]["wait"] == 0


def test_a_step_counts_its_values_and_its_time(pause):
    progress = Progress()
    progress.tick()
    pause(0.05)
    progress.add({"loss": 2.0})
    progress.add({"loss": 1.0})
    assert (progress.step, progress.count, progress.mean("loss")) == (2, 2, 1.5)
    assert (progress.took, progress.trained, progress.seconds) == pytest.approx((0, 0.05, 0.05))


@dataclass(frozen=True)
class Scored:
    """The scores of an epoch, as far as they decide which is kept."""

    main: float
    standard_error: float = 0.02

    def row(self) -> dict[str, float]:
        return {"loss": 1.0, "top1": self.main}

    def by(self, _: str | None) -> tuple[float, float]:
        return self.main, self.standard_error


@pytest.mark.parametrize(
    ("scores", "kept"),
    [
        ([0.5, 0.7, 0.9], 3),
        ([0.5, 0.9, 0.89, 0.885], 4),  # as good as the best
        ([0.5, 0.9, 0.85, 0.7], 2),  # overfitting
        ([0.5, 0.9, 0.89, 0.87, 0.88], 5),
        ([0.5, 0.9, 0.89, 0.7], 3),
        ([0.9, 0.89, 0.95, 0.92], 3),  # measured from the best so far
        ([0.9, 0.885, 0.87, 0.855], 2),  # not from the one kept, which would drift
        ([-3.0], 1),
    ],
)
def test_the_last_epoch_within_one_standard_error_of_the_best_is_kept(scores: list[float], kept: int):
    progress = Progress()
    for main in scores:
        progress.close_epoch(Scored(main))
        state, progress = progress.state_dict(), Progress()
        progress.load_state_dict(state)
    assert progress.kept == kept
    assert progress.best == max(scores)


def test_without_a_standard_error_the_last_of_the_best_is_kept():
    progress = Progress()
    for main in (0.5, 0.9, 0.9, 0.8999):
        progress.close_epoch(Scored(main, 0.0))
    assert progress.kept == 3


def test_the_state_of_an_earlier_version_keeps_its_best_until_there_is_a_better_one():
    progress = Progress()
    state = progress.state_dict() | {"best": 0.9}
    del state["error"], state["kept"]
    progress.load_state_dict(state)
    kept = []
    for main in (0.89, 0.91, 0.9):
        progress.close_epoch(Scored(main))
        kept.append(progress.kept)
    assert kept == [0, 2, 3]


def test_a_state_of_something_else_is_refused():
    with pytest.raises(TypeError):
        Progress().load_state_dict({"steps": 3})
