"""The queue: what is computed together, what is refused, what is late, and that nothing accepted is lost."""

from __future__ import annotations

import threading
import time

import pytest

from vitrail.serve.batcher import Batcher, Job
from vitrail.serve.errors import ApiError
from vitrail.serve.metrics import Metrics, Shared


class Computer:
    """Doubles numbers, and remembers the batches; it can be held up."""

    def __init__(self):
        self.batches = []
        self.go = threading.Event()
        self.begun = threading.Event()

    def __call__(self, items):
        self.begun.set()
        assert self.go.wait(60)
        self.batches.append(items)
        if "bad" in items:
            raise ValueError("a bad item")
        return [item * 2 for item in items]


@pytest.fixture
def metrics():
    return Metrics(Shared(["m"], 1))


@pytest.fixture
def begin(metrics):
    made = []

    def make(max_batch=4, max_wait=0.0, capacity=100):
        made.append(Batcher(max_batch, max_wait, capacity, metrics))
        return made[-1]

    yield make
    for batcher in made:
        batcher.close(60)
        assert not batcher.alive


def submit(batcher, item, compute, key="key", seconds=60.0):
    batcher.admit()
    return batcher.submit(Job(key, item, compute, time.monotonic() + seconds))


def test_what_arrives_during_a_batch_is_the_next_batch(begin):
    batcher, compute = begin(max_batch=4), Computer()
    futures = [submit(batcher, 0, compute)]
    assert compute.begun.wait(60)
    futures += [submit(batcher, i, compute) for i in range(1, 8)]
    compute.go.set()
    assert [future.result(60) for future in futures] == [2 * i for i in range(8)]
    assert compute.batches == [[0], [1, 2, 3, 4], [5, 6, 7]]


def test_only_equal_keys_are_computed_together_oldest_first(begin):
    batcher, one, two, held = begin(max_batch=8), Computer(), Computer(), Computer()
    first = submit(batcher, 0, held, "held")
    assert held.begun.wait(60)
    futures = [submit(batcher, i, two if i % 2 else one, f"key {i % 2}") for i in range(1, 7)]
    for compute in (held, one, two):
        compute.go.set()
    assert [future.result(60) for future in (first, *futures)] == [0, 2, 4, 6, 8, 10, 12]
    assert (two.batches, one.batches) == ([[1, 3, 5]], [[2, 4, 6]])


def test_it_waits_for_images_that_are_being_decoded(begin):
    batcher, compute = begin(max_batch=2, max_wait=60), Computer()
    compute.go.set()
    batcher.admit(2)
    futures = [batcher.submit(Job("key", 1, compute, time.monotonic() + 60))]
    time.sleep(0.05)
    futures.append(batcher.submit(Job("key", 2, compute, time.monotonic() + 60)))
    assert [future.result(60) for future in futures] == [2, 4]
    assert compute.batches == [[1, 2]]


def test_it_does_not_wait_for_images_that_failed(begin):
    batcher, compute = begin(max_batch=2, max_wait=300), Computer()
    compute.go.set()
    batcher.admit(2)
    future = batcher.submit(Job("key", 1, compute, time.monotonic() + 60))
    batcher.release(1, submitted=0)
    assert future.result(60) == 2


def test_a_full_queue_refuses_with_503(begin, metrics):
    batcher = begin(capacity=3)
    batcher.admit(2)
    with pytest.raises(ApiError, match="full") as caught:
        batcher.admit(2)
    assert (caught.value.status, caught.value.headers) == (503, {"Retry-After": "1"})
    batcher.release(2, submitted=0)
    batcher.admit(3)
    assert batcher.full
    assert 'vitrail_rejected_total{reason="full"} 1' in metrics.text([])
    batcher.release(3, submitted=0)


def test_late_and_cancelled_jobs_are_not_computed(begin):
    batcher, compute = begin(), Computer()
    first = submit(batcher, 0, compute)
    assert compute.begun.wait(60)
    late, unwanted, good = (submit(batcher, i, compute, seconds=s) for i, s in ((1, -1.0), (2, 60.0), (3, 60.0)))
    unwanted.cancel()
    compute.go.set()
    with pytest.raises(ApiError, match="in time") as caught:
        late.result(60)
    assert caught.value.status == 503
    assert (first.result(60), good.result(60)) == (0, 6)
    assert compute.batches == [[0], [3]]


def test_a_failed_batch_does_not_end_the_thread(begin):
    batcher, compute = begin(), Computer()
    compute.go.set()
    with pytest.raises(ValueError, match="a bad item"):
        submit(batcher, "bad", compute).result(60)
    assert submit(batcher, 1, compute).result(60) == 2


def test_closing_computes_what_was_accepted(begin):
    batcher, compute = begin(max_batch=2), Computer()
    futures = [submit(batcher, i, compute) for i in range(7)]
    threading.Timer(0.1, compute.go.set).start()
    batcher.close(60)
    assert [future.result(0) for future in futures] == [2 * i for i in range(7)]
    with pytest.raises(ApiError):
        batcher.admit()
