"""Outputs of a split are computed once: how often a model sees the validation images at the end of a run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

import vitrail
from vitrail.evaluate.features import split_scores
from vitrail.evaluate.stream import Keep, run_split, stream
from vitrail.models.vit import ViT
from vitrail.runs.predictor import Predictor
from vitrail.runs.run import Run
from vitrail.weights import open_run

pytestmark = pytest.mark.usefixtures("plain_runs")

VAL = 359  # validation images of digits


@pytest.fixture
def seen() -> Iterator[list[int]]:
    """The images in every call of a model that is not being trained."""
    counts: list[int] = []

    def count(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if isinstance(module, ViT) and not module.training:
            counts.append(len(inputs[0]))

    handle = register_module_forward_pre_hook(count)
    yield counts
    handle.remove()


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def test_at_the_end_of_training_the_validation_images_pass_through_the_model_once(tiny, tmp_path, seen):
    run = vitrail.train("digits", out=tmp_path, name="run", **tiny)
    assert sum(seen) == 2 * VAL  # of the epoch, and of the model that was kept
    seen.clear()
    vitrail.report(run)
    vitrail.evaluate(run)
    assert sum(seen) < VAL  # the report looks into a few images
    assert max(seen, default=0) <= 32


def test_galleries_reuse_the_outputs(run, digits, seen):
    vitrail.explain(run, [digits / "0" / "0.png"], data="digits")
    assert sum(seen[i] == 32 for i in range(len(seen))) < VAL // 32


def outputs_of(run: Path, **changes) -> np.ndarray:
    folder = Run(run)
    split, file = folder.data().splits["val"], folder.outputs_file("digits", "val")
    scores, outputs, _ = split_scores(Predictor(run), split, file, **changes)
    assert scores.to_json() == folder.card.task.measure(outputs, split.targets).to_json()
    return outputs


def test_outputs_are_those_of_the_model(run, seen):
    kept = outputs_of(run)
    assert not seen
    model, card = open_run(run)
    fresh, targets = run_split(model, Run(run).data().splits["val"], card.preprocess)
    assert np.array_equal(kept, fresh)
    assert np.array_equal(targets, Run(run).data().splits["val"].targets)


def test_other_weights_are_run_anew(run, seen):
    before = outputs_of(run)
    model, card = open_run(run)
    with torch.no_grad():
        model.head.bias += 1
    vitrail.weights.save(Run(run).weights_file, model, card)
    after = outputs_of(run)
    assert sum(seen) == VAL
    np.testing.assert_allclose(after, before + 1, rtol=1e-5, atol=1e-5)
    outputs_of(run)
    assert sum(seen) == VAL


def test_a_damaged_file_is_made_anew_and_nothing_is_kept_unasked(run, seen):
    file = Run(run).outputs_file("digits", "val")
    file.write_bytes(b"PK damaged")
    for passes in (1, 2):
        outputs_of(run, keep=False)
        assert sum(seen) == passes * VAL
    outputs_of(run)
    outputs_of(run)
    assert sum(seen) == 3 * VAL


def test_outputs_of_another_engine_are_recomputed_if_one_is_named(run, seen):
    split, file = Run(run).data().splits["val"], Run(run).outputs_file("digits", "val")
    plain = outputs_of(run)
    _, outputs, used = split_scores(Predictor(run, engine="packed"), split, file, engine="packed")
    assert used == "packed"
    assert np.abs(outputs - plain).max() < 1e-4 * np.abs(plain).max()
    seen.clear()
    _, again, used = split_scores(Predictor(run), split, file)  # any engine will do
    assert used == "packed"
    assert np.array_equal(again, outputs)
    assert not seen
    _, again, used = split_scores(Predictor(run, engine="torch"), split, file, engine="torch")
    assert used == "torch"
    assert np.array_equal(again, plain)


def test_a_stream_adds_batch_by_batch(run):
    class Sizes(Keep):
        def add(self, outputs, targets):
            super().add(outputs, targets)
            sizes.append((outputs.shape, targets.shape))

    sizes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    predictor, split = Predictor(run), Run(run).data().splits["val"]
    meter = Sizes()
    stream(predictor.tensor_outputs, split, predictor.card.preprocess, [meter], batch_size=100)
    assert sizes == [((100, 10), (100,))] * 3 + [((59, 10), (59,))]
    np.testing.assert_allclose(meter.outputs, outputs_of(run), rtol=1e-4, atol=1e-4)
