"""When a run ends: after its steps, or with a time budget after its seconds, annealed either way."""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest

import vitrail
from vitrail.config import Duration, OptimConfig, TrainConfig, coerce, load_yaml
from vitrail.errors import UserError
from vitrail.train.checkpoint import load_checkpoint
from vitrail.train.progress import Progress
from vitrail.train.schedule import Schedule

pytestmark = pytest.mark.usefixtures("plain_runs")

OPTIM = OptimConfig(
    epochs=2, batch_size=10, opt="muon", lr=1.0, weight_decay=0, sched="linear", warmup_epochs=0.2
)  # two epochs of 50 steps, 10 of them warm-up
STEPS = Schedule(OPTIM, per_epoch=50, validation=0)
TIME = replace(STEPS, optim=replace(OPTIM, time_budget=Duration(200)))


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("10m", 600), ("1h30m", 5400), ("1.5h", 5400), ("2H", 7200), ("1h1s", 3601)]
)
def test_reads_times_as_people_write_them(text, seconds):
    assert coerce(TrainConfig, "time_budget", text) == seconds


@pytest.mark.parametrize("text", ["", "10", "m", "1.2.3m", "ten minutes", "0s", "-5m", 600, True])
def test_refuses_what_is_no_time(text):
    with pytest.raises(UserError, match=r"'time_budget' must be at least a second, as in 90s, 10m or 1h30m"):
        coerce(TrainConfig, "time_budget", text)


@pytest.mark.parametrize("text", ["45s", "10m", "1h30m", "2h1s"])
def test_writes_times_as_it_reads_them(text):
    assert str(coerce(TrainConfig, "time_budget", text)) == text


def test_by_steps_the_clock_does_not_matter():
    for seconds in (0, 1e6):
        assert STEPS.lr(Progress(step=55, seconds=seconds)) == pytest.approx(0.5)
        assert not STEPS.over(Progress(step=99, seconds=seconds))
        assert STEPS.over(Progress(step=100, seconds=seconds))


@pytest.mark.parametrize(("epochs", "steps", "parts"), [(0.001, 1, 1), (0.5, 25, 1), (2.005, 100, 2), (2.02, 101, 3)])
def test_epochs_may_be_parts_of_one(epochs, steps, parts):
    schedule = replace(STEPS, optim=replace(OPTIM, epochs=epochs))
    assert (schedule.steps, schedule.epochs) == (steps, parts)


def test_by_time_the_number_of_steps_does_not_matter():
    for step in (1, 10_000):
        assert TIME.lr(Progress(step=step, seconds=110)) == pytest.approx(0.5)
        assert TIME.lr(Progress(step=step, seconds=200)) == pytest.approx(0)
        assert not TIME.over(Progress(step=step, seconds=199))
        assert TIME.over(Progress(step=step, seconds=200))


def test_keeps_time_free_for_the_last_validation():
    slow = replace(TIME, validation=30.0)  # a third as long as 30 steps
    assert not slow.over(Progress(step=90, seconds=179))
    assert slow.over(Progress(step=90, seconds=180))
    assert slow.lr(Progress(step=90, seconds=180)) == pytest.approx(0)


def test_the_time_in_which_a_teacher_was_asked_is_of_the_budget_but_tells_nothing_of_the_steps():
    slow = replace(TIME, validation=30.0)
    begun = Progress(step=1, seconds=121, prepared=120)  # by 121 seconds a step, the last validation would take 1,210
    assert not slow.over(begun)
    assert TIME.lr(Progress(step=0, seconds=120, prepared=120)) == pytest.approx(0.1)  # the warm-up is not left out
    assert TIME.lr(Progress(step=40, seconds=164, prepared=120)) == pytest.approx(0.5)
    assert TIME.over(Progress(step=80, seconds=200, prepared=120))
    assert STEPS.seconds_left(Progress(step=50, seconds=170, prepared=120)) == pytest.approx(50)


def test_there_is_one_step_even_if_there_is_no_time_for_it():
    assert not TIME.over(Progress(step=0, seconds=1e6))


@pytest.fixture(scope="module")
def timed(tmp_path_factory, tiny):
    settings = {name: value for name, value in tiny.items() if name != "epochs"}
    return vitrail.train("digits", time_budget="2s", out=tmp_path_factory.mktemp("timed"), **settings)


def test_a_run_by_time_ends_with_a_measurement_of_its_last_step(timed):
    with (timed / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert load_yaml(TrainConfig, timed / "config.yaml").optim.time_budget == 2
    state = load_checkpoint(timed, "cpu")
    assert state is not None
    assert int(rows[-1]["step"]) == state["progress"]["step"] > 0
    assert (timed / "model.safetensors").exists()


def test_a_run_by_time_that_is_over_does_not_go_on(timed):
    before = (timed / "metrics.csv").read_text()
    vitrail.train(resume=timed)
    assert (timed / "metrics.csv").read_text() == before


def test_epochs_and_time_together_are_refused(tmp_path, tiny):
    with pytest.raises(UserError, match="--epochs and --time-budget both set"):
        vitrail.train("digits", time_budget="2s", out=tmp_path, **tiny)
    assert not any(tmp_path.iterdir())
