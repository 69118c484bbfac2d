"""Signals: training saves and stops; the evaluation that follows stops at once."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

import vitrail
from vitrail.runs.run import Run
from vitrail.train import start

pytestmark = pytest.mark.usefixtures("plain_runs")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_training_saves_and_stops(tiny, tmp_path, number):
    def send(*_: Any) -> None:
        os.kill(os.getpid(), number)

    how = tiny | {"epochs": 2}
    before = signal.signal(number, signal.SIG_DFL)  # nohup ignores SIGHUP
    try:
        with pytest.raises(KeyboardInterrupt):
            vitrail.train("digits", out=tmp_path, name="run", on_epoch=send, **how)
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)
    run = Run(tmp_path / "run")
    assert run.checkpoint_file.exists()
    assert len(run.history) == 1


def test_a_signal_stops_the_final_evaluation(tiny, tmp_path, monkeypatch):
    after = []

    def evaluate(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        after.append("went on")

    monkeypatch.setattr(start, "evaluate_on", evaluate)
    with pytest.raises(KeyboardInterrupt):
        vitrail.train("digits", out=tmp_path, name="run", **tiny)
    assert after == []
    assert Run(tmp_path / "run").finished
