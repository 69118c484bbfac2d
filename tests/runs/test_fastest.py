"""The choice of an engine: by speed, only if it is safe, and cached."""

from __future__ import annotations

import json
import logging
import os
import shutil
from dataclasses import replace

import pytest
import torch
from families import TINY, batch
from peers import randomise

import vitrail
from vitrail.models import build
from vitrail.runs import fastest
from vitrail.runs.engine import PROGRAMS, Engine, Program
from vitrail.tasks import Multiclass

TASK = Multiclass(("a", "b", "c"))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache folder, and no patience: the first batch is followed by a speed test, a short one."""
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fastest, "_PATIENCE", 0.0)
    monkeypatch.setattr(fastest, "_SECONDS", 0.1)
    return tmp_path / "cache" / "engines.json"


@pytest.fixture
def model():
    return randomise(build(TINY["pvt"])).eval()


@pytest.fixture
def run(model, caplog):
    """Computes three batches with a fresh engine; returns its name and the log."""

    def compute() -> tuple[str, str]:
        caplog.clear()
        caplog.set_level(logging.INFO, "vitrail")
        engine, images = Engine(model, TASK, "cpu"), batch(model, 6)
        with torch.inference_mode():
            expected = model(images)
            for _ in range(3):
                assert (engine(images) - expected).abs().max() < 0.05 * expected.abs().max()  # it may choose bf16
        return engine.name, caplog.text

    return compute


def made(compute) -> Program:
    """An engine of our own, always considered."""
    return Program("Mine", lambda module, _: lambda images: compute(module, images), 1e-3, lambda: True)


def only(monkeypatch, **programs: Program) -> None:
    for name in PROGRAMS:
        monkeypatch.setitem(PROGRAMS, name, replace(PROGRAMS[name], available=lambda: False))
    for name, program in programs.items():
        monkeypatch.setitem(PROGRAMS, name, program)


@pytest.fixture
def quick(monkeypatch):
    """One engine, which takes no time to build: where the choice is not the point."""
    only(monkeypatch, packed=made(lambda module, images: module(images)))


def costs_nothing(cache) -> None:
    """So that the next job changes engines after its first batch, however slow the machine was."""
    results = json.loads(cache.read_text())
    cache.write_text(json.dumps({key: result | {"cost": 0.0} for key, result in results.items()}))


def test_a_long_job_chooses_and_the_next_one_remembers(cache, run):
    name, said = run()
    (result,) = json.loads(cache.read_text()).values()
    assert result["engine"] == name
    assert said.count("Engine: ") == 1
    costs_nothing(cache)
    kept = cache.read_text()
    assert run()[0] == name
    assert cache.read_text() == kept


def test_the_faster_engine_is_chosen(cache, run, monkeypatch):
    answers: dict[int, torch.Tensor] = {}

    def recall(module, images):
        if len(images) not in answers:
            answers[len(images)] = module(images)
        return answers[len(images)]

    only(monkeypatch, packed=made(recall))
    # Outputs that are computed once and then looked up beat any computation.
    name, said = run()
    assert name == "packed"
    assert "Engine: Mine, " in said
    assert "× PyTorch." in said
    costs_nothing(cache)
    assert "(measured earlier)" in run()[1]


@pytest.mark.parametrize(
    ("compute", "reason"),
    [
        (lambda module, images: module(images) * 1.01, "outputs differ from PyTorch's by 1.0e-02"),
        (lambda module, images: module(images) * torch.nan, "outputs differ from PyTorch's by nan"),
        (lambda module, images: module(images).expand(6, -1), "the shape (6, 3)|expand"),
        (lambda *_: 1 / 0, "division by zero"),
    ],
)
def test_an_unsafe_engine_is_rejected(run, monkeypatch, compute, reason):
    only(monkeypatch, packed=made(compute))
    name, said = run()
    assert name == "torch"
    assert "The engine packed is not used: " in said
    assert any(part in said for part in reason.split("|"))


def test_an_engine_with_other_answers_is_rejected():
    expected = torch.tensor([[1.0, 0.9999, 0.0], [0.0, 1.0, 0.0]])
    assert fastest.unsafe("packed", expected.clone(), expected, TASK) is None
    given = expected + torch.tensor([0.0, 0.0005, 0.0])
    assert fastest.unsafe("packed", given, expected, TASK) == "1 of 2 answers differ from PyTorch's"
    assert fastest.unsafe("packed", given, expected, None) is None  # features have no answers


def test_a_remembered_engine_must_still_be_safe(cache, run, monkeypatch):
    only(monkeypatch, packed=made(lambda module, images: module(images) + 1.0))
    run()
    kept = json.loads(cache.read_text())
    cache.write_text(json.dumps({key: {"engine": "packed", "speed": 2.0, "cost": 0.0} for key in kept}))
    name, said = run()
    assert name == "torch"
    assert "The engine packed is not used" in said


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("content", ["", "{", "[]", "null", "\xff\x00"])
def test_a_damaged_cache_is_replaced(cache, run, content):
    cache.parent.mkdir()
    cache.write_bytes(content.encode("latin-1"))
    name, _ = run()
    (result,) = json.loads(cache.read_text()).values()
    assert result["engine"] == name


@pytest.mark.usefixtures("quick")
def test_a_fifo_in_the_place_of_the_cache_is_replaced(cache, run):
    cache.parent.mkdir()
    os.mkfifo(cache)
    name, _ = run()
    (result,) = json.loads(cache.read_text()).values()
    assert result["engine"] == name


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("entry", [1, {}, {"engine": "warp", "speed": 2.0, "cost": 0.0}, {"engine": "packed"}])
def test_a_damaged_entry_is_replaced(cache, run, entry):
    run()
    cache.write_text(json.dumps(dict.fromkeys(json.loads(cache.read_text()), entry)))
    name, _ = run()
    (result,) = json.loads(cache.read_text()).values()
    assert result["engine"] == name


@pytest.mark.usefixtures("quick")
def test_an_unwritable_cache_does_not_stop_the_job(tmp_path, run, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "file" / "cache"))
    name, said = run()
    assert name in ("torch", *PROGRAMS)
    assert "The choice of the engine is not cached" in said


def test_without_a_result_a_job_waits(cache, model, monkeypatch):
    monkeypatch.setattr(fastest, "_PATIENCE", 1000.0)
    engine = Engine(model, TASK, "cpu")
    with torch.inference_mode():
        engine(batch(model))
    assert engine.name == "torch"
    assert not cache.exists()


@pytest.mark.usefixtures("quick")
def test_results_depend_on_the_architecture_and_the_batch_size(cache, model):
    other = randomise(build(TINY["swin"])).eval()
    with torch.inference_mode():
        for some, count in ((model, 2), (model, 3), (other, 2)):
            Engine(some, TASK, "cpu")(batch(some, count))
        Engine(model, None, "cpu", "auto", "features")(batch(model, 2))
    assert len(json.loads(cache.read_text())) == 4


def test_predict_evaluate_and_embed_choose(cache, trained, digits, tmp_path, caplog):
    caplog.set_level(logging.INFO, "vitrail")
    plain = list(vitrail.predict(trained, [digits], engine="torch", batch_size=32))
    chosen = list(vitrail.predict(trained, [digits], batch_size=32))
    same = [ours.labels[0] == theirs.labels[0] for ours, theirs in zip(plain, chosen, strict=True)]
    assert sum(same) >= 0.98 * len(plain)  # all of them, unless it chose bf16 and there are ties
    vectors = [len(e.features) for e in vitrail.embed(trained, [digits], batch_size=32)]
    assert len(vectors) == len(plain)
    run = shutil.copytree(trained, tmp_path / "run", ignore=shutil.ignore_patterns("features"))
    vitrail.evaluate(run, batch_size=64, method="knn", out=tmp_path / "knn")
    results = json.loads(cache.read_text())
    assert ["outputs of" in key for key in results] == [True, False, False]
    assert [key.rpartition("of ")[2] for key in results] == ["32", "32", "64"]
    tested = [line for line in caplog.messages if line.startswith("Engine: ") and "earlier" not in line]
    assert len(tested) == 3
