"""What no verb expects: errors of the system, faults of vitrail, and containers with few cores."""

from __future__ import annotations

import os

import pytest

from vitrail import cli


@pytest.mark.parametrize(("limit", "threads"), [("150000 100000", "1"), ("50000 100000", "1"), ("max 100000", None)])
def test_a_container_limits_the_threads(monkeypatch, tmp_path, limit, threads):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", "x")
    monkeypatch.delenv("OMP_NUM_THREADS")
    (tmp_path / "cpu.max").write_text(limit)
    cli._limit_threads(str(tmp_path / "cpu.max"))
    assert os.environ.get("OMP_NUM_THREADS") == threads


@pytest.mark.parametrize(
    ("load", "busy"),
    [("8.12 6.0 5.0 9/107 4711", True), ("8.12 6.0 5.0 2/107 4711", False), ("0.5 6.0 5.0 9/107 4711", False)],
)
def test_a_machine_is_busy_if_it_is_now_and_was_before(monkeypatch, tmp_path, load, busy):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    (tmp_path / "loadavg").write_text(load)
    assert cli._is_busy(str(tmp_path / "loadavg")) == busy


def test_a_fault_is_one_sentence(monkeypatch, capsys):
    def fail(_: object) -> int:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(cli, "run", fail)
    with pytest.raises(SystemExit) as end:
        cli.main(["models"])
    assert end.value.code == 1
    assert capsys.readouterr().err == (
        "vitrail: A fault of vitrail: ZeroDivisionError: by zero. --debug shows it; please report it.\n"
    )
    with pytest.raises(ZeroDivisionError):
        cli.main(["models", "--debug"])


@pytest.mark.parametrize("error", [MemoryError(), PermissionError(13, "Permission denied", "a.txt")])
def test_errors_of_the_system_are_the_users(monkeypatch, capsys, error):
    def fail(_: object) -> int:
        raise error

    monkeypatch.setattr(cli, "run", fail)
    with pytest.raises(SystemExit) as end:
        cli.main(["models"])
    assert end.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


REFUSED = [
    "report RUN --device nonsense --out new",
    "evaluate RUN --device nonsense --out new",
    "explain RUN --device nonsense --out new",
    "embed RUN nowhere --out new/a.npz",
    "embed RUN digits --device nonsense --out new/a.npz",
    "predict RUN nowhere --out new/a.csv",
    "export RUN --out new/a.nonsense",
    "convert RUN new/a.safetensors --to nonsense",
    "train digits --device nonsense --out new",
    "train digits --img-size 1000000 --out new",
    "train digits --folds 1 --out new",
    "train digits --teacher nowhere.onnx --out new",
    "pretrain digits --device nonsense --out new",
    "study pooling digits --budget 1s --out new",
]


@pytest.mark.parametrize("words", REFUSED)
def test_a_refused_command_is_one_sentence_and_leaves_nothing(words, trained, tmp_path, monkeypatch, vitrail_says):
    monkeypatch.chdir(tmp_path)
    code, _, error = vitrail_says(*(trained if word == "RUN" else word for word in words.split()))
    assert code == 2
    assert error.splitlines()[-1].startswith("vitrail: ")
    assert list(tmp_path.iterdir()) == []
