from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from measuring import measure
from PIL import Image

import vitrail
from vitrail.config import (
    ArchConfig,
    AugmentConfig,
    InputConfig,
    OptimConfig,
    RunConfig,
    SourceConfig,
    TrainConfig,
    save_yaml,
)
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources import open_data
from vitrail.errors import UserError
from vitrail.evaluate.stream import run_split
from vitrail.models import Model, create
from vitrail.tasks import Multiclass
from vitrail.tasks.class_scores import MulticlassScores
from vitrail.verbs.evaluate import evaluate
from vitrail.weights import Card, save

CLASSES = tuple("0123456789")
FILES = {"metrics.json", "outputs.npz", "confusion.png", "confusion.csv", "per_class.csv", "reliability.png"}


def tiny(classes: tuple[str, ...] = CLASSES) -> tuple[Model, Card]:
    torch.manual_seed(0)
    model = create("vit_nano2", img_size=8, channels=1, classes=len(classes), depth=2).eval()
    torch.nn.init.normal_(model.head.weight)  # a fresh head is zero and would find all images alike
    preprocess = Preprocess((8, 8), 1)
    return model, Card(model="vit_nano2", config=model.config, task=Multiclass(classes), preprocess=preprocess)


def make_run(folder: Path, data: str, seed: int = 3, val_fraction: float = 0.25) -> Path:
    folder.mkdir()
    config = TrainConfig(
        data=data,
        recipe="nano",
        model="vit_nano2",
        source=SourceConfig(val_fraction=val_fraction),
        input=InputConfig(img_size=(8, 8), channels=1),
        arch=ArchConfig(
            pool="gap", pos="learned", head="linear", stem="conv", registers=0, layer_scale=0.0, drop=0.0, drop_path=0.0
        ),
        optim=OptimConfig(
            epochs=1, batch_size=8, opt="adamw", lr=1e-3, weight_decay=0.0, sched="cosine", warmup_epochs=0.0
        ),
        augment=AugmentConfig(),
        run=RunConfig(name=folder.name, seed=seed, device="cpu", amp="off"),
    )
    save_yaml(config, folder / "config.yaml")
    save(folder / "model.safetensors", *tiny())
    return folder


def arrays(images: int = 40, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (images, 8, 8), np.uint8), np.arange(images) % 10


def paint(folder: Path, per_class: int = 3, classes: tuple[str, ...] = CLASSES) -> Path:
    random = np.random.default_rng(1)
    for name in classes:
        (folder / name).mkdir(parents=True)
        for i in range(per_class):
            Image.fromarray(random.integers(0, 256, (8, 8), np.uint8)).save(folder / name / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def npz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "noise.npz"
    images, labels = arrays()
    np.savez(path, images=images, labels=labels)
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, npz: Path) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "run", str(npz))


@pytest.fixture(scope="module")
def evaluated(run: Path) -> MulticlassScores:
    return evaluate(run)


def test_logits_are_those_of_the_model_in_the_order_of_the_split(npz: Path):
    model, card = tiny()
    split = open_data(npz).splits["train"]
    logits, labels = run_split(model, split, card.preprocess, batch_size=7)
    with torch.no_grad():
        expected = model(torch.stack([card.preprocess(split.image(i)) for i in range(len(split))]))
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, expected.numpy(), rtol=1e-5, atol=1e-5)
    assert labels.tolist() == split.targets.tolist()


@pytest.mark.parametrize("training", [True, False])
def test_predicting_leaves_the_mode_of_the_model_as_it_was(npz: Path, training: bool):
    model, card = tiny()
    model.drop.p = 0.5
    split = open_data(npz).splits["val"]
    expected, _ = run_split(model.eval(), split, card.preprocess)
    logits, _ = run_split(model.train(training), split, card.preprocess)
    assert model.training is model.blocks[0].training is training
    assert np.array_equal(logits, expected)  # without dropout, whatever the mode was


def test_mode_is_restored_when_the_data_fails(tmp_path: Path):
    model, card = tiny()
    split = open_data(paint(tmp_path / "photos")).splits["train"]
    Path(split.name(5)).unlink()
    with pytest.raises(UserError, match="is no longer"):
        run_split(model.train(), split, card.preprocess)
    assert model.training


def test_a_run_is_evaluated_on_its_own_validation_images(evaluated: MulticlassScores, npz: Path):
    model, card = tiny()
    split = open_data(npz, val_fraction=0.25, seed=3).splits["val"]
    expected = measure(*run_split(model, split, card.preprocess), CLASSES)
    assert evaluated.images == len(split) < 40
    assert evaluated.summary() == expected.summary()
    assert evaluated.confusion.tolist() == expected.confusion.tolist()


def test_files_are_written_into_the_run_and_say_the_same(evaluated: MulticlassScores, run: Path):
    metrics = evaluated
    assert metrics.folder == run / "evaluation" / "noise-val"
    assert {path.name for path in metrics.folder.iterdir()} == FILES
    document = json.loads((metrics.folder / "metrics.json").read_text())
    assert {"model": "vit_nano2", "data": "noise", "split": "val"}.items() <= document.items()
    assert metrics.to_json().items() <= document.items()
    with (metrics.folder / "confusion.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header[1:] == [row[0] for row in rows] == list(CLASSES)
    assert [[int(cell) for cell in row[1:]] for row in rows] == metrics.confusion.tolist()
    with (metrics.folder / "per_class.csv").open(newline="") as file:
        scores = list(csv.DictReader(file))
    assert [score["class"] for score in scores] == list(CLASSES)
    assert [float(s["recall"]) for s in scores] == pytest.approx([s.recall for s in metrics.per_class], abs=1e-6)
    for name in ("confusion.png", "reliability.png"):
        with Image.open(metrics.folder / name) as image:
            assert image.format == "PNG"


def test_another_split_and_another_place_that_holds_old_files(evaluated: MulticlassScores, run: Path, tmp_path: Path):
    out = tmp_path / "some" / "where"
    out.mkdir(parents=True)
    (out / "metrics.json").write_text("old")
    metrics = evaluate(run, split="train", out=out)
    assert metrics.images == 40 - evaluated.images
    assert json.loads((out / "metrics.json").read_text())["top1"] == round(metrics.top1, 6)
    assert {path.name for path in out.iterdir()} == FILES - {"outputs.npz"}  # which is kept in the run only


def test_the_runs_own_data_given_by_hand_is_not_mixed_with_its_training_images(
    evaluated: MulticlassScores, run: Path, npz: Path
):
    given = evaluate(run, npz.parent / ".." / npz.parent.name / npz.name)
    assert given.confusion.tolist() == evaluated.confusion.tolist()


def test_other_data_without_splits_is_evaluated_whole(run: Path, tmp_path: Path):
    metrics = evaluate(run, paint(tmp_path / "photos", per_class=1, classes=("7", "3")))
    assert metrics.images == 2
    assert metrics.confusion.sum(axis=1).tolist() == [0, 0, 0, 1, 0, 0, 0, 1, 0, 0]
    assert metrics.folder == run / "evaluation" / "photos-all"


@pytest.mark.parametrize(("splits", "images"), [(("train", "val", "test"), 20), (("test",), 10)])
def test_other_data_with_splits_is_evaluated_on_what_was_held_out(
    run: Path, tmp_path: Path, splits: tuple[str, ...], images: int
):
    for number, split in enumerate(splits, 1):
        paint(tmp_path / "photos" / split, per_class=number)
    assert evaluate(run, tmp_path / "photos", out=tmp_path / "out").images == images


def test_a_weights_file_alone_needs_data(tmp_path: Path):
    save(tmp_path / "model.safetensors", *tiny())
    with pytest.raises(UserError, match="Give the data"):
        evaluate(tmp_path / "model.safetensors")
    images, labels = arrays(20)
    np.savez(tmp_path / "other.npz", x_val=images, y_val=labels)
    metrics = evaluate(tmp_path / "model.safetensors", tmp_path / "other.npz")
    assert metrics.images == 20
    assert metrics.folder == tmp_path / "evaluation" / "other-val"


def test_an_unknown_split_names_those_there_are(run: Path):
    with pytest.raises(UserError, match=r"no split 'vall'\. Did you mean 'val'\? Its splits are train, val\."):
        evaluate(run, split="vall")


def test_data_whose_classes_the_model_does_not_know_is_refused(run: Path, tmp_path: Path):
    with pytest.raises(UserError, match="'ten' that the model does not know"):
        evaluate(run, paint(tmp_path / "photos", classes=("1", "ten")))


def test_own_data_that_has_lost_a_class_is_refused(tmp_path: Path):
    photos = paint(tmp_path / "photos")
    run = make_run(tmp_path / "run", str(photos))
    for path in (photos / "7").iterdir():
        path.unlink()
    (photos / "7").rmdir()
    with pytest.raises(UserError, match="10 classes when the run was trained, and has 9: 7 were added or removed"):
        evaluate(run)


def test_weights_that_diverged_are_refused_and_nothing_is_written(tmp_path: Path, npz: Path):
    run = make_run(tmp_path / "run", str(npz))
    model, card = tiny()
    model.head.bias.data[0] = torch.nan
    save(run / "model.safetensors", model, card)
    with pytest.raises(UserError, match="NaN or infinite values"):
        evaluate(run)
    assert not (run / "evaluation").exists()


def test_wrong_inputs_are_one_sentence(run: Path, tmp_path: Path, npz: Path):
    with pytest.raises(UserError, match="'batch_size' must be at least 1"):
        evaluate(run, batch_size=0)
    with pytest.raises(UserError, match="neither a run folder nor a weights file"):
        evaluate(tmp_path / "nowhere")
    with pytest.raises(UserError, match="cannot be created"):
        evaluate(run, out=npz / "inside a file")


def test_the_table_for_people_shows_all_of_few_classes_and_the_worst_of_many(evaluated: MulticlassScores):
    metrics = evaluated
    text = metrics.table()
    assert f"{metrics.top1:.2%}" in text
    assert str(metrics.folder) in text
    assert sum(line.startswith(CLASSES) for line in text.splitlines()) == 10
    worst = min(metrics.per_class, key=lambda score: score.f1)
    rows = metrics.table(most=2).splitlines()
    header = next(i for i, row in enumerate(rows) if row.startswith("class"))
    assert "2 classes of 10" in rows[header - 1]
    assert rows[header + 1].startswith(worst.name)


@pytest.mark.parametrize("method", ["knn", "linear", "fewshot"])
def test_a_pretrained_model_is_measured_by_probes_on_labelled_data(pretrained, tmp_path, vitrail_says, method):
    metrics = evaluate(pretrained, "digits", method=method, out=tmp_path)  # the images that it has read without labels
    assert metrics.images == 359
    code, _, error = vitrail_says("evaluate", pretrained, "--method", method)
    assert code == 2
    assert "was pre-trained without labels, so its own data has none to measure with. Give labelled data" in error


@pytest.mark.parametrize("words", [["evaluate"], ["predict", "x.png"], ["export"]])
def test_a_pretrained_model_makes_no_predictions_and_the_error_says_what_to_do(pretrained, vitrail_says, words):
    verb, *images = words
    code, _, error = vitrail_says(verb, pretrained, *images)
    if verb == "predict":  # paths are checked first
        assert "x.png does not exist" in error
        code, _, error = vitrail_says(verb, pretrained, pretrained / "curves.png")
    assert code == 2
    assert f"{pretrained} was pre-trained by MAE and has no head. Fine-tune it with `vitrail train LABELLED" in error
    assert f"vitrail evaluate {pretrained} LABELLED --method knn`." in error


def test_another_image_size_is_measured_beside_the_own(trained, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    own = json.loads((run / "evaluation/digits-val/metrics.json").read_text())
    scores = vitrail.evaluate(run, img_size=12)
    assert scores.folder == run / "evaluation/digits-val-12x12"
    assert json.loads((scores.folder / "metrics.json").read_text())["img_size"] == "12x12"
    assert scores.images == own["images"]
    assert scores.loss != own["loss"]
    assert json.loads((run / "evaluation/digits-val/metrics.json").read_text()) == own
    assert vitrail.evaluate(run).loss == pytest.approx(own["loss"], abs=1e-5)
    with pytest.raises(UserError, match="multiple of the patch size"):
        vitrail.evaluate(run, img_size=9)
