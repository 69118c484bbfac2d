"""The learning-rate range test."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from PIL import Image

import vitrail
from vitrail.errors import UserError
from vitrail.train import loop
from vitrail.train.find_lr import HIGHEST, LOWEST, STEPS, growing, rate, rising, smooth, suggest
from vitrail.train.progress import Progress

pytestmark = pytest.mark.usefixtures("plain_runs")


def range_test(loss_at):
    """The losses of a made-up training whose loss is a function of the learning rate."""
    losses = []
    while len(losses) < STEPS and not rising(losses):
        losses.append(loss_at(growing(Progress(step=len(losses)))))
    return losses


def valley(lr):
    """Falls between 1e-4 and 1e-2, fastest at 1e-3, and rises again from 0.1 on."""
    decades = math.log10(lr)
    return 2 - 1 / (1 + math.exp(-4 * (decades + 3))) + max(decades + 1, 0) * 3


def test_the_rate_grows_by_the_same_factor_from_step_to_step():
    assert range_test(lambda _: 1.0) == [1.0] * STEPS
    rates = [growing(Progress(step=step)) for step in range(STEPS)]
    assert (rates[0], rates[-1]) == pytest.approx((LOWEST, HIGHEST))
    assert np.ptp(np.diff(np.log(rates))) < 1e-9


def test_the_suggestion_is_where_the_loss_falls_fastest():
    assert suggest(range_test(valley)) == pytest.approx(1e-3, rel=0.2)


def test_chance_does_not_move_it_far():
    rng = np.random.default_rng(0)
    assert 3e-4 < suggest(range_test(lambda lr: valley(lr) + 0.05 * rng.normal())) < 3e-3


def test_it_stops_when_training_diverges():
    losses = range_test(valley)
    assert 0.1 < rate(len(losses) - 1) < 3
    assert losses[-1] > 3


def test_no_rate_is_suggested_where_the_loss_only_rises():
    with pytest.raises(UserError, match="The loss fell at no learning rate"):
        suggest(range_test(lambda lr: 1 + lr))


def test_smoothing_keeps_a_line_straight_inside_and_its_length():
    line = [60 + 0.5 * step for step in range(60)]
    assert smooth(line)[20:40] == pytest.approx(line[20:40])
    assert len(smooth(line)) == 60


def test_a_loss_that_explodes_does_not_hide_the_others():
    assert smooth([1.0] * 30 + [1e30])[:20] == pytest.approx([1.0] * 20, rel=0.1)


@pytest.mark.parametrize("settings", [{"opt": "muon"}, {"opt": "sgd", "amp": "fp16", "grad_accum": 2}], ids=str)
def test_training_finds_a_rate_and_leaves_nothing_but_the_curve(settings, small, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("vitrail.train.find_lr.STEPS", 60)
    given = {**small, **settings, "out": tmp_path, "name": "mine", "find_lr": True}
    folder = vitrail.train("digits", **given)
    assert folder == tmp_path / "mine-find-lr"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["lr.json", "lr.png", "mine-find-lr"]
    numbers = json.loads((folder / "lr.json").read_text())
    assert LOWEST < numbers["suggestion"] < HIGHEST
    assert len(numbers["lr"]) == len(numbers["loss"]) == len(numbers["smoothed"]) > 20
    assert f"--lr {numbers['suggestion']:g}" in caplog.text
    with Image.open(folder / "lr.png") as image:
        assert min(image.size) > 200

    before = (folder / "lr.json").read_bytes()
    assert vitrail.train("digits", **given) == tmp_path / "mine-find-lr-2"
    assert (folder / "lr.json").read_bytes() == before
    assert (tmp_path / "mine-find-lr-2" / "lr.json").read_bytes() == before  # the same seed, the same losses


def test_a_loss_that_is_suddenly_not_finite_is_the_end_and_no_error(small, tmp_path, monkeypatch):
    """From a rate that learns to the largest, which ends it within a step."""
    monkeypatch.setattr("vitrail.train.find_lr.growing", lambda progress: 0.1 if progress.step < 20 else 1e30)
    folder = vitrail.train("digits", **small, opt="adamw", find_lr=True, out=tmp_path)
    numbers = json.loads((folder / "lr.json").read_text())
    assert len(numbers["loss"]) == 21
    assert np.isfinite(numbers["smoothed"]).all()


def test_stopped_it_leaves_nothing(small, tmp_path, monkeypatch):
    def stop(*_arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "make_batch", stop)
    with pytest.raises(KeyboardInterrupt):
        vitrail.train("digits", **small, find_lr=True, out=tmp_path / "runs")
    assert list(tmp_path.iterdir()) == []


def test_it_goes_on_with_no_run_and_replaces_none(small, tmp_path):
    for more in ({"overwrite": True}, {"resume": tmp_path}):
        with pytest.raises(UserError, match="Remove --resume, --overwrite"):
            vitrail.train("digits", **small, find_lr=True, out=tmp_path / "runs", **more)
    with pytest.raises(UserError, match="and --folds"):
        vitrail.train("digits", find_lr=True, folds=3, out=tmp_path)
    assert list(tmp_path.iterdir()) == []
