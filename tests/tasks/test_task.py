"""What holds for every task."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from vitrail.errors import UserError
from vitrail.tasks import TASKS, Multiclass, Multilabel, Pairs, Regression, Task, register, task_type
from vitrail.tasks.captions import pack
from vitrail.tasks.pair_scores import Reader
from vitrail.tokenizers import Tokenizer
from vitrail.weights.card import read_card

ABC = ("a", "b", "c")
OLD_RUN = Path(__file__).parent.parent / "runs" / "old_run"


class Axes(Reader):
    """The texts a, b and c as the axes of the joint space."""

    scale = 1.0

    def read(self, texts):
        return np.eye(3)[[ABC.index(text) for text in texts]]


def examples(count: int = 101) -> dict[str, tuple[Task, np.ndarray, np.ndarray]]:
    """Of each task: itself, outputs, targets."""
    random = np.random.default_rng(0)
    outputs = random.normal(size=(count, 3)).astype(np.float32)
    classes, labels = random.integers(0, 3, count), (random.random((count, 3)) < 0.4).astype(np.float32)
    mean, std = (40.0, 1.7, -3.0), (10.0, 0.1, 2.0)
    values = (outputs + random.normal(size=outputs.shape)) * std + mean
    return {
        "multiclass": (Multiclass(ABC), outputs, classes),
        "multiclass, calibrated": (Multiclass(ABC, 0.7), outputs, classes),
        "multilabel": (Multilabel(ABC, (0.5, 0.3, 0.6)), outputs, labels),
        "multilabel, thresholds to be chosen": (Multilabel(ABC), outputs, labels),
        "regression": (Regression(ABC, mean, std), outputs, values.astype(np.float32)),
        "pairs": (Pairs(dims=3, reader=Axes(Tokenizer(), 99)), outputs, pack([ABC[k] for k in classes])),
    }


CASES = pytest.mark.parametrize(("task", "outputs", "targets"), examples().values(), ids=examples())


def test_every_registered_task_is_tested():
    labelled = {name: task for name, task in TASKS.items() if task.labelled}
    annotated = {name for name, task in labelled.items() if task.annotated}  # in files of their own
    assert {task.name for task, *_ in examples().values()} == labelled.keys() - annotated
    assert all((Path(__file__).parent / f"test_{name}.py").exists() for name in annotated)


@CASES
def test_meters_of_halves_merge_to_the_scores_of_one(task: Task, outputs: np.ndarray, targets: np.ndarray):
    whole, first, second = task.meter(), task.meter(), task.meter()
    for at in range(0, len(outputs), 10):
        batch = slice(at, at + 10)
        whole.add(outputs[batch], targets[batch])
        (first if at < 50 else second).add(outputs[batch], targets[batch])
    first.merge(second)
    merged = first.scores()
    assert merged.to_json() == whole.scores().to_json() == task.measure(outputs, targets).to_json()
    assert merged.images == len(outputs)


@pytest.mark.parametrize("name", ["multilabel", "regression"])
def test_merging_keeps_the_order_of_the_images(name: str):
    task, outputs, targets = examples()[name]
    first, second = task.meter(), task.meter()
    first.add(outputs[:50], targets[:50])
    second.add(outputs[50:], targets[50:])
    first.merge(second)
    np.testing.assert_array_equal(first.scores().targets, targets)


@CASES
def test_scores_are_restored_from_json(task: Task, outputs: np.ndarray, targets: np.ndarray):
    scores = task.measure(outputs, targets)
    restored = task.restore(json.loads(json.dumps(scores.to_json())))
    assert restored.summary() == scores.summary()
    assert restored.to_json() == scores.to_json()
    assert restored.table().splitlines()[0] == scores.table().splitlines()[0]


@CASES
def test_losses_are_those_that_the_scores_average(task: Task, outputs: np.ndarray, targets: np.ndarray):
    assert task.losses(outputs, targets).mean() == pytest.approx(task.measure(outputs, targets).loss)


@CASES
def test_the_standard_error_is_that_of_the_bootstrap(task: Task, outputs: np.ndarray, targets: np.ndarray):
    scores = task.measure(outputs, targets)
    main = task.measures[0].name
    samples = task.sample(scores, outputs, targets).whole[main]
    assert scores.standard_error == pytest.approx(samples.std(), rel=0.1)


@CASES
def test_one_image_has_a_standard_error(task: Task, outputs: np.ndarray, targets: np.ndarray):
    assert task.measure(outputs[:1], targets[:1]).standard_error == 0


@CASES
def test_tasks_are_restored_from_json(task: Task, outputs: np.ndarray, targets: np.ndarray):
    if not task.to_json().get("thresholds", True):
        task = task.measured(task.measure(outputs, targets))
    document = json.loads(json.dumps(task.to_json()))
    assert task_type(document["task"]).from_json(document) == task


def test_an_older_card_is_multi_class_and_a_wrong_one_is_refused(tmp_path: Path):
    path = tmp_path / "model.json"
    document = json.loads((OLD_RUN / "model.json").read_text())
    for name in ("task", "thresholds", "target_mean", "target_std"):
        document.pop(name, None)
    path.write_text(json.dumps(document))
    card = read_card(path)
    assert card.task == Multiclass(tuple(document["classes"]))
    count = len(card.classes)
    for change, message in (
        ({"task": "segment"}, "'task' must be one of"),
        ({"task": "multilabel", "thresholds": [0.5]}, f"'thresholds' must have one number for each of {count} labels"),
        ({"task": "regression"}, "not a vitrail model card"),
    ):
        path.write_text(json.dumps(document | change))
        with pytest.raises(UserError, match=message):
            read_card(path)


def test_a_name_is_given_to_one_task():
    class Other(Multiclass):
        pass

    with pytest.raises(UserError, match="There already is a task 'multiclass'"):
        register(Other)
    assert register(Multiclass) is Multiclass
