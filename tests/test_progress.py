"""Progress away from a terminal."""

from __future__ import annotations

from vitrail import progress
from vitrail.progress import log, track, without_info


def test_without_a_terminal_progress_is_reported_in_lines(monkeypatch, caplog):
    caplog.set_level("INFO", "vitrail")
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    assert list(track(iter("abcdefg"), "checking", total=8, unit="img", done=1)) == list("abcdefg")
    assert caplog.messages == ["checking: 4 of 8 img, 40 s left", "checking: 7 of 8 img, 10 s left"]
    caplog.clear()
    assert len(list(track(range(3), "embedding", unit="img"))) == 3
    assert caplog.messages == ["embedding: 3 img"]


def test_what_was_logged_before_is_left_out(caplog):
    caplog.set_level("INFO", "vitrail")
    with without_info():
        log.info("known")
        log.warning("important")
    log.info("new")
    assert caplog.messages == ["important", "new"]
