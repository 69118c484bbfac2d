"""A world of one process, and that a run asks it wherever several would have to act as one."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest
import torch

import vitrail
from vitrail.train.checkpoint import load_checkpoint
from vitrail.world import World, world

pytestmark = pytest.mark.usefixtures("plain_runs")


@pytest.fixture
def join(monkeypatch):
    """Makes every run join this world."""
    return lambda world: monkeypatch.setattr("vitrail.world._world", world)


class Interrupted(World):
    """Interrupted at the third step."""

    asked = 0

    def agree(self, *flags):
        self.asked += 1
        return (True, *flags[1:]) if self.asked == 3 else flags


def test_alone_everything_is_as_it_was():
    alone = World.join()
    rows, order = torch.arange(3.0), torch.tensor([2, 0, 1])
    assert alone is world()
    assert alone.first()
    assert alone.share(rows) is alone.merge(rows) is alone.total(rows) is alone.average(rows) is rows
    assert alone.fetch(rows, order).tolist() == [2, 0, 1]
    assert alone.drawn(torch.arange, 3).tolist() == [0, 1, 2]
    assert alone.count(torch.tensor(0)) == 1
    assert alone.mean({"loss": 2.0}) == {"loss": 2.0}
    assert alone.agree(True, False) == (True, False)
    assert alone.every("a") == ["a"]
    assert alone.once(lambda: 7) == alone.in_turn(lambda: 7) == 7


def test_all_stop_when_one_is_interrupted(small, tmp_path, join):
    join(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        vitrail.train("digits", out=tmp_path, name="run", **small)
    assert load_checkpoint(tmp_path / "run", "cpu")["progress"]["step"] == 3


def test_a_process_reads_its_share_and_shows_the_mean(small, tmp_path, join):
    class Half(World):
        read = 0

        def share(self, rows):
            return rows[: len(rows) // 2]

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

    half = Half()
    join(half)
    run = vitrail.train("digits", out=tmp_path, **small)
    assert half.read == 899 // 64 * 32
    assert load_checkpoint(run, "cpu")["progress"]["rows"][0]["train_loss"] == 7.0


def test_only_the_first_process_writes(small, tmp_path, join):
    class Second(World):
        def first(self):
            return False

    join(Second())
    with pytest.raises(vitrail.UserError):  # there is no model to evaluate in the end
        vitrail.train("digits", out=tmp_path, name="run", save_minutes=0.0, **small)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"config.yaml"}


def test_the_same_command_of_torchrun_continues_its_unfinished_run(small, tmp_path, join, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "photos")  # its --rdzv-id
    join(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        vitrail.train("digits", out=tmp_path, name="run", **small)
    join(World())
    assert vitrail.train("digits", out=tmp_path, name="run", **small).finished
    with pytest.raises(vitrail.UserError, match="exists"):
        vitrail.train("digits", out=tmp_path, name="run", **small)


@pytest.mark.parametrize(
    ("others", "message"), [(False, "process 1 does not see it"), (7, "machines have different checkpoints")]
)
def test_a_run_on_machines_that_do_not_share_its_folder_is_refused(small, tmp_path, join, others, message):
    class First(World):
        def every(self, thing):
            return [thing, others if type(thing) is type(others) else thing]

    join(First())
    with pytest.raises(vitrail.UserError, match=message):
        vitrail.train("digits", out=tmp_path, **small)


@pytest.mark.skipif(sys.platform == "win32", reason="has no parents that change")
def test_processes_of_a_killed_torchrun_save_and_stop(tmp_path):
    """The heartbeat of a process whose parent is gone sends the signal on which training saves and stops."""
    process = f"""
import signal, sys, time
from pathlib import Path
from torch.distributed import HashStore
from vitrail.world.heartbeat import Heartbeat
signal.signal(signal.SIGTERM, lambda *_: (Path({str(tmp_path / "stopped")!r}).touch(), sys.exit()))
Heartbeat(HashStore(), 0, 1, 1.0, print)
print(flush=True)
time.sleep(60)
"""
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {process!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as torchrun:
        torchrun.stdout.readline()
        torchrun.kill()
    for _ in range(1000):
        if (tmp_path / "stopped").exists():
            return
        time.sleep(0.02)
    raise AssertionError("it goes on")


def test_a_batch_must_be_shared_equally(small, tmp_path, join):
    class Three(World):
        size = 3

    join(Three())
    with pytest.raises(vitrail.UserError, match="--batch-size 63 or 66"):
        vitrail.train("digits", out=tmp_path, **small)
    assert not [*tmp_path.iterdir()]


def test_meters_of_processes_are_merged_in_order(join, trained):
    from vitrail.data import open_data
    from vitrail.evaluate.stream import run_split
    from vitrail.weights import open_run

    model, card = open_run(trained)
    split = open_data("digits").splits["val"]
    outputs, targets = run_split(model, split, card.preprocess, batch_size=32)

    class Second(World):
        """The second of two; the first has done its part."""

        def part(self, items):
            return items[len(items) // 2 :]

        def merge(self, meter):
            before.merge(meter)
            return before

    class First(World):
        def part(self, items):
            return items[: len(items) // 2]

        def merge(self, meter):
            nonlocal before
            before = meter
            return meter

    before = None
    join(First())
    run_split(model, split, card.preprocess, batch_size=32)
    join(Second())
    ours, labels = run_split(model, split, card.preprocess, batch_size=32)
    np.testing.assert_array_equal(ours, outputs)
    np.testing.assert_array_equal(labels, targets)
