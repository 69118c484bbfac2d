"""Threads in containers with few cores and on busy machines."""

from __future__ import annotations

import os

import pytest

from vitrail import threads
from vitrail.threads import is_busy, limit_threads


@pytest.mark.parametrize(("limit", "threads"), [("150000 100000", "1"), ("50000 100000", "1"), ("max 100000", None)])
def test_a_container_limits_the_threads(monkeypatch, tmp_path, limit, threads):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", "x")
    monkeypatch.delenv("OMP_NUM_THREADS")
    (tmp_path / "cpu.max").write_text(limit)
    limit_threads(str(tmp_path / "cpu.max"))
    assert os.environ.get("OMP_NUM_THREADS") == threads


@pytest.mark.parametrize(
    ("load", "busy"),
    [("8.12 6.0 5.0 9/107 4711", True), ("8.12 6.0 5.0 2/107 4711", False), ("0.5 6.0 5.0 9/107 4711", False)],
)
def test_a_machine_is_busy_if_it_is_now_and_was_before(monkeypatch, tmp_path, load, busy):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    (tmp_path / "loadavg").write_text(load)
    assert is_busy(str(tmp_path / "loadavg")) == busy


@pytest.mark.parametrize(("busy", "wanted"), [(True, "OMP_WAIT_POLICY"), (False, "GOMP_SPINCOUNT")])
def test_threads_yield_at_once_on_a_busy_machine_alone(monkeypatch, busy, wanted):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)
    monkeypatch.setattr(threads, "is_busy", lambda: busy)
    threads.settle_threads()
    assert {name for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT") if name in os.environ} == {wanted}
