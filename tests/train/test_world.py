"""A world of one process, and that the loop asks it wherever several would have to act as one."""

from __future__ import annotations

import numpy as np
import pytest
from vitrail.train.world import World

import vitrail
from vitrail.train.checkpoint import load_checkpoint


@pytest.fixture
def join(monkeypatch):
    """Makes every run join this world."""
    return lambda world: monkeypatch.setattr(World, "join", lambda: world)


def test_alone_everything_is_as_it_was():
    world = World.join()
    numbers = np.arange(3)
    assert world.first()
    assert world.share(numbers) is world.merge(numbers) is numbers
    assert world.mean({"loss": 2.0}) == {"loss": 2.0}
    assert (world.agree(True), world.agree(False)) == (True, False)


def test_all_stop_when_one_is_interrupted(small, tmp_path, join):
    class Interrupted(World):
        asked = 0

        def agree(self, flag):
            self.asked += 1
            return flag or self.asked == 8

    join(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        vitrail.train("digits", out=tmp_path, name="run", **small)
    assert load_checkpoint(tmp_path / "run", "cpu")["progress"]["step"] == 3


def test_a_process_reads_its_share_and_shows_the_mean(small, tmp_path, join):
    class Half(World):
        read = 0

        def share(self, numbers):
            return numbers[: len(numbers) // 2]

        def wrap(self, objective):
            forward = objective.forward

            def counting(batch):
                self.read += len(batch.images)
                assert len(batch.numbers) == len(batch.images) == len(batch.targets)
                return forward(batch)

            objective.forward = counting
            return objective

        def mean(self, values):
            return dict.fromkeys(values, 7.0)

    world = Half()
    join(world)
    run = vitrail.train("digits", out=tmp_path, **small)
    assert world.read == 899 // 64 * 32
    assert load_checkpoint(run, "cpu")["progress"]["rows"][0]["train_loss"] == 7.0


def test_only_the_first_process_writes(small, tmp_path, join):
    class Second(World):
        def first(self):
            return False

    join(Second())
    with pytest.raises(vitrail.UserError):  # there is no model to evaluate in the end
        vitrail.train("digits", out=tmp_path, name="run", save_minutes=0.0, **small)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {".lock", "config.yaml", "train.log"}
