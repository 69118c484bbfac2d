"""Metrics: valid for Prometheus, summed over processes, and never decreasing."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys

import pytest
from prometheus_client.parser import text_string_to_metric_families

from vitrail.serve.metrics import Metrics, Shared


def read(text):
    return {
        (s.name, *sorted(s.labels.items())): s.value for f in text_string_to_metric_families(text) for s in f.samples
    }


def count(shared, times):
    """What a worker does."""
    metrics = Metrics(shared)
    metrics.set("queue", 5)
    for _ in range(times):
        metrics.request("/predict", 200, 0.03)


def in_process(*arguments):
    process = multiprocessing.get_context("spawn").Process(target=count, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == 0


def test_numbers_of_all_processes_are_added_also_of_those_that_died():
    shared = Shared(["a"], 2)
    metrics = Metrics(shared)
    metrics.request("/predict", 200, 0.03)
    metrics.set("queue", 2)
    in_process(shared, 3)
    in_process(shared, 4)  # takes the place of the first, and goes on from its numbers
    values = read(metrics.text([("a", "v1")]))
    assert values["vitrail_requests_total", ("route", "/predict"), ("status", "200")] == 8
    assert values[("vitrail_queue_images",)] == 2  # what the dead had in their queues is gone
    assert list(shared.owners).count(0) == shared.rows - 2
    assert values["vitrail_model_info", ("model", "a"), ("version", "v1")] == 1


def test_histograms_are_cumulative():
    metrics = Metrics(Shared(["a"], 1))
    for size in (1, 1, 3, 16, 500):
        metrics.observe("batch", size)
    values = read(metrics.text([]))
    buckets = [values["vitrail_batch_images_bucket", ("le", le)] for le in ("1", "2", "4", "16")]
    assert buckets == [2, 2, 3, 4]
    assert values["vitrail_batch_images_bucket", ("le", "+Inf")] == values[("vitrail_batch_images_count",)] == 5
    assert values[("vitrail_batch_images_sum",)] == 521


def test_paths_that_clients_invent_are_one_series():
    metrics = Metrics(Shared(["a"], 1))
    for path in ("/../../etc", "/x" * 1000, '/"}\n'):
        metrics.request(path, 418, 0.01)
    assert read(metrics.text([]))["vitrail_requests_total", ("route", "other"), ("status", "0")] == 3


@pytest.mark.parametrize("model", ["digits", "file"])
def test_the_service_counts_images_and_requests(service, photo, model):
    def images():
        return read(service.get("/metrics").text)["vitrail_images_total", ("model", model)]

    before = images()
    service.post("/predict", files=[("image", photo)] * 3, model=model)
    assert images() == before + 3


def test_a_worker_that_is_killed_while_it_loads_holds_up_no_other():
    shared = Shared(["a"], workers=2)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    with shared.loading():
        shared._loader[0] = dead.pid
        for _ in range(2):  # who takes its place, and who comes next
            with shared.loading():
                assert shared._loader[0] == os.getpid()
