"""Boxes through every verb, on made images: what a model of one minute has learnt is not measured here."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from boxes_made import image, table
from PIL import Image
from torchless import predict_evaluate_and_serve

import vitrail
from vitrail.data import open_data
from vitrail.plan.machines import machine
from vitrail.plan.settings import planned
from vitrail.plan.trace import Tracer

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

pytestmark = pytest.mark.usefixtures("detector", "plain_runs")  # only `detector` has figures and a report

TINY: dict[str, Any] = {
    "model": "vit_w64d2h2m128p8",
    "stem": "conv",
    "img_size": 64,
    "epochs": 4,
    "batch_size": 8,
    "opt": "adamw",
    "lr": 2e-3,
}


@pytest.fixture(scope="session")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixteen images for training and eight for validation, with boxes in YOLO's form. Read-only."""
    from detect import make

    return make(tmp_path_factory.mktemp("shapes"), 16)


@pytest.fixture(scope="session")
def detector(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run trained on `shapes` for four epochs. Read-only."""
    return vitrail.train(shapes, out=tmp_path_factory.mktemp("runs"), name="shapes", **TINY).path


@pytest.fixture(scope="session")
def exported_detector(detector: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The proof of the run as an ONNX file. Read-only."""
    return vitrail.export(detector, out=tmp_path_factory.mktemp("exported") / "model.onnx")


def test_a_run_and_its_evaluation(detector, shapes):
    with (detector / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert float(rows[-1]["train_loss"]) < float(rows[0]["train_loss"])
    card = json.loads((detector / "model.json").read_text())
    assert card["task"] == "boxes"
    assert card["classes"] == ["disc", "square"]
    scores = vitrail.evaluate(detector)
    assert scores.ap50 == pytest.approx(card["metrics"]["ap50"], abs=1e-6)
    assert "AP50" in scores.table()
    files = {path.name for path in scores.folder.iterdir()}
    assert {"metrics.json", "per_class.csv", "confusion.csv", "precision_recall.png", "confusion.png"} <= files
    assert (detector / "report.html").stat().st_size > 50_000
    again = vitrail.evaluate(detector, shapes / "data.yaml", split="train")
    assert again.images == 16


def test_a_resumed_run_is_the_same_to_the_bit(shapes, tmp_path, monkeypatch):
    """The run folder is copied in the middle of the second epoch, and training goes on from there."""
    run, moments = tmp_path / "run", []

    def watched(source, target):
        if Path(target).name == "state.pt":
            moments.append(shutil.copytree(run, tmp_path / str(len(moments))))
        return replace(source, target)

    replace = Path.replace
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", watched)
        vitrail.train(shapes, out=tmp_path, name="run", **(TINY | {"epochs": 2, "save_minutes": 0.0, "model_ema": 0.9}))
    assert len(moments) >= 4
    vitrail.train(resume=moments[3])
    for name in ("model.safetensors", "model.json"):
        assert (moments[3] / name).read_bytes() == (run / name).read_bytes()


def command(words: list[str]) -> None:
    from vitrail.cli import main

    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0


def test_predictions_in_every_form(detector, shapes, tmp_path, capsys):
    files = sorted((shapes / "images" / "val").iterdir())[:2]
    words = ["predict", str(detector), *map(str, files), "--threshold", "0.01"]
    command([*words, "--out", str(tmp_path / "boxes.csv"), "--pictures", str(tmp_path / "pictures")])
    assert len(list((tmp_path / "pictures").glob("*_overlay.jpg"))) == 2
    data = open_data(tmp_path / "boxes.csv", val_fraction=0.5)  # predictions are a table to train on
    assert data.task.name == "boxes"
    capsys.readouterr()
    command([*words, "--format", "coco"])
    results = json.loads(capsys.readouterr().out)
    assert set(results[0]) == {"image_id", "category_id", "bbox", "score"}
    answers = list(vitrail.predict(detector, files, threshold=0.01))
    assert len(results) == sum(len(p.answer.boxes) for p in answers) > 0
    command(words[:-2])
    assert all(p.answer.layer().size == (64, 64) for p in answers)


def test_an_exported_file_has_suppression_inside(detector, exported_detector, shapes, tmp_path):
    import onnxruntime

    proof = exported_detector
    assert proof.same == proof.images == 8
    session = onnxruntime.InferenceSession(proof.file)
    file = shapes / "images" / "val" / "0.png"
    pixels = np.asarray(Image.open(file).resize((96, 48)))[None]
    (found,) = session.run(["detections"], {"pixels": pixels})
    assert found.shape == (1, 100, 6)
    assert (found[0, :, 2] <= 96).all()
    Image.fromarray(pixels[0]).save(tmp_path / "wide.png")
    (answer,) = vitrail.predict(detector, [tmp_path / "wide.png"], threshold=0.02)
    expected = np.column_stack([answer.answer.boxes, answer.probabilities])
    np.testing.assert_allclose(found[0, :5], np.column_stack([expected[:5], found[0, :5, 5]]), atol=0.2)
    (other,) = vitrail.predict(proof.file, [tmp_path / "wide.png"], threshold=0.02)
    assert len(other.answer.boxes) == pytest.approx(len(expected), abs=5)


def test_an_exported_file_needs_no_torch(exported_detector, detector, shapes, tmp_path):
    file = shapes / "images" / "val" / "0.png"
    predict_evaluate_and_serve(exported_detector.file, shapes / "data.yaml", file, tmp_path)
    scores = json.loads((tmp_path / "metrics.json").read_text())
    assert scores["ap50"] == pytest.approx(vitrail.evaluate(detector).ap50, abs=0.01)
    assert (tmp_path / "pictures" / "0_overlay.jpg").exists()


def test_relevance_is_for_the_strongest_box_of_a_class(detector, shapes, tmp_path):
    file = shapes / "images" / "val" / "0.png"
    found = vitrail.explain(detector, [file], out=tmp_path)
    assert (tmp_path / "relevance.png").exists()
    assert np.abs(found.arrays["relevance"]["relevance"]).max() > 0


def test_the_service_answers_with_boxes(detector, shapes):
    from served import in_thread

    file = shapes / "images" / "val" / "0.png"
    with in_thread(detector) as service:
        facts = service.get("/model").json()
        answer = service.predict(file.read_bytes(), threshold=0.02, scores=True)
        refused = service.post("/predict", file.read_bytes(), threshold=2)
        explained = service.post("/explain", file.read_bytes(), method="relevance", target="disc").json()
    assert facts["form"] == "boxes"
    (expected,) = vitrail.predict(detector, [file], threshold=0.02)
    assert answer["labels"] == list(expected.labels)
    np.testing.assert_allclose(answer["boxes"], expected.answer.boxes, atol=0.1)
    assert len(answer["scores"]) == 2
    assert refused.status_code == 422
    assert len(explained["map"]) == 8


def test_a_table_trains_as_well(tmp_path):
    run = vitrail.train(table(tmp_path / "data"), out=tmp_path, name="run", **(TINY | {"epochs": 1, "batch_size": 2}))
    assert vitrail.evaluate(run.path).images >= 1


def test_detr_trains_as_well(shapes, tmp_path):
    run = vitrail.train(shapes, out=tmp_path, name="detr", **(TINY | {"epochs": 1, "head": "detr"}))
    assert json.loads((run.path / "model.json").read_text())["config"]["head"] == "detr"
    assert vitrail.evaluate(run.path).images == 8


def test_instances_of_masks_become_boxes(tmp_path):
    for i in range(4):
        image(tmp_path / "images" / f"{i}.png", seed=i)
        mask = np.zeros((48, 64), np.uint16)
        mask[5:20, 10:30], mask[30:40, 40:60] = 7, 300
        (tmp_path / "masks").mkdir(exist_ok=True)
        Image.fromarray(mask).save(tmp_path / "masks" / f"{i}.png")
    data = open_data(tmp_path, task="boxes")
    assert data.splits["train"].targets[0].tolist() == [[0, 10, 5, 30, 20, 0], [0, 40, 30, 60, 40, 0]]


def test_yolos_goes_to_transformers_and_back(shapes, tmp_path):
    from peers import TOLERANCE, distance, transformers

    settings = TINY | {"epochs": 1, "head": "yolos", "pool": "cls", "stem": "patch"}
    run = vitrail.train(shapes, out=tmp_path, name="run", **settings)
    folder = vitrail.convert(run.path, tmp_path / "hf", to="hf").parent
    theirs = transformers().YolosForObjectDetection.from_pretrained(folder).eval()
    ours = vitrail.load(run.path)
    pixels = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert distance(ours(pixels)[..., 4:], theirs(pixels).logits) < TOLERANCE
    file = shapes / "images" / "val" / "0.png"
    explained = vitrail.explain(run.path, [file], out=tmp_path / "figures")
    assert explained.arrays["relevance"]["relevance"].max() > 0
    (folder / "model.json").unlink()
    back = vitrail.load(folder)
    assert back.card.task.name == "boxes"
    with torch.no_grad():
        assert distance(back(pixels), ours(pixels)) < TOLERANCE


def test_settings_that_do_not_suit_boxes_are_refused(shapes, tmp_path):
    for wrong, message in (
        ({"mixup": 0.2}, "does not apply to detection data"),
        ({"head": "linear"}, "must be one of fcos, pyramid, yolos, yolos-mid, detr, but it is linear"),
        ({"head": "yolos", "pool": "gap"}, "The head yolos needs a ViT with a class token"),
    ):
        with pytest.raises(vitrail.UserError, match=message):
            vitrail.train(shapes, out=tmp_path, name="wrong", **(TINY | wrong))


def test_a_run_is_planned_with_its_memory(shapes, detector):
    plan = vitrail.plan(data=shapes, device="A100", **TINY)
    assert plan.parameters == sum(p.numel() for p in vitrail.load(detector).parameters())
    assert plan.memory.activations > 0
    config, data = planned(shapes, None, None, machine("A100"), TINY | {"head": "detr"})
    assert Tracer(data, gpu=True)(config).operations != plan.operations  # whose loss assigns boxes to objects
