"""Exported files give the answers of PyTorch, and are not kept if they do not."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from peers import randomise
from PIL import ExifTags, Image
from safetensors.torch import save_file

import vitrail
from vitrail import models
from vitrail.cli import main
from vitrail.data.preprocess import Preprocess
from vitrail.errors import UserError
from vitrail.export.onnx import write
from vitrail.export.proof import prove
from vitrail.export.sample import Sample, to_check
from vitrail.models.vit import ViTConfig
from vitrail.runs.predictor import Predictor
from vitrail.tasks import Multiclass, Multilabel, Task
from vitrail.weights import Card, open_run, save

DOCS = Path(__file__).parent.parent.parent / "docs"
VIT = ViTConfig(width=16, depth=1, heads=2, mlp=32, patch=4, img_size=(8, 12), classes=3)
NAMES = ("class 0", "class 1", "class 2")


def card(task: Task | None = None, **settings: Any) -> Card:
    return Card(
        model="a model", config=VIT, task=task or Multiclass(NAMES), preprocess=Preprocess((8, 12), 3, **settings)
    )


@pytest.fixture(scope="module")
def openvino(trained, exported, tmp_path_factory) -> Path:
    """The run as an OpenVINO file, made from the ONNX file of `exported`."""
    out = tmp_path_factory.mktemp("openvino") / "digits.xml"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitrail.export.onnx.write", lambda path, *_: shutil.copy(exported.file, path))
        return vitrail.export(trained, format="openvino", out=out).file


@pytest.fixture
def tampered(exported, tmp_path) -> Callable[[Callable[[NDArray[Any]], NDArray[Any]]], Path]:
    """Makes a copy of the exported file with another head."""

    def tamper(change: Callable[[NDArray[Any]], NDArray[Any]]) -> Path:
        graph = onnx.load(exported.file)
        head = [tensor for tensor in graph.graph.initializer if tensor.name.startswith("model.head.")]
        assert [tensor.name for tensor in head] == ["model.head.weight", "model.head.bias"]
        for tensor in head:
            tensor.CopyFrom(onnx.numpy_helper.from_array(change(onnx.numpy_helper.to_array(tensor)), tensor.name))
        onnx.save(graph, tmp_path / "tampered.onnx")
        return tmp_path / "tampered.onnx"

    return tamper


def test_the_proof_lies_beside_the_file(exported):
    assert sorted(path.name for path in exported.file.parent.iterdir()) == ["digits.onnx", "digits.onnx.json"]
    document = json.loads(exported.file.with_name("digits.onnx.json").read_text())
    assert document == json.loads(json.dumps(exported.to_json()))
    assert document["source"] == "359 images of digits, split val"
    assert (document["images"], document["same_answers"]) == (359, 1.0)
    assert set(document["differences"]) == {"logits", "probabilities"}
    assert 0 < document["differences"]["logits"]["relative"] < 1e-4
    assert document["files"]["digits.onnx"]["bytes"] == exported.file.stat().st_size
    assert document["scores"]["file"] == document["scores"]["PyTorch"] > 0.5
    assert document["points_lost"] == 0
    assert document["resized_by_the_file"] == {"same": 16, "images": 16}
    for speed in document["speed"].values():
        assert min(speed["latency_ms"], speed["images_per_second"], speed["peak_mb"]) > 0
    assert document["speed"]["ONNX"]["peak_mb"] < 0.7 * document["speed"]["PyTorch"]["peak_mb"]  # it has no torch
    assert document["versions"]["onnxruntime"] == onnxruntime.__version__
    assert re.search(r"^answers +359 of 359 the same$", exported.table(), re.M)


def test_the_program_in_the_docs_says_what_predict_says(exported, trained, digits, tmp_path, monkeypatch, capsys):
    (code,) = re.findall(r"```python\n(import.*?)```", (DOCS / "export.md").read_text(), re.S)
    shutil.copy(exported.file, tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    assert exported.card.task.temperature != 1  # the probabilities in the graph are calibrated, too
    turned = Image.Exif()
    turned[ExifTags.Base.Orientation] = 6
    for image in sorted(digits.rglob("*.png"))[::60]:
        Image.open(image).save("photo.jpg", format="PNG", exif=turned)  # without loss
        exec(compile(code, "export.md", "exec"), {})
        (told,) = vitrail.predict(trained, ["photo.jpg"], top=1)
        assert capsys.readouterr().out == f"{told.labels[0]} {told.probabilities[0]:.1%}\n"


@pytest.mark.parametrize("change", [np.negative, lambda head: head * np.float32("nan")], ids=["other", "nan"])
def test_another_model_is_not_proven(change, tampered, exported, trained):
    model, about = open_run(trained)
    sample = to_check(trained, about, None, 1)
    assert (
        prove(
            exported.file, model, about, replace(sample, pixels=sample.pixels[:5], targets=None, whole=[]), "ONNX"
        ).same
        == 5
    )
    with pytest.raises(
        UserError, match=r"differs from the model: on 359 images of digits, split val its outputs differ"
    ):
        prove(tampered(change), model, about, sample, "ONNX")


def test_an_answer_between_two_that_are_as_good_is_no_failure(trained, tampered):
    model, about = open_run(trained)
    sample = to_check(trained, about, None, 1)
    twins = tampered(lambda head: head[[0, 1, 2, 3, 4, 5, 0, 7, 8, 9]])  # two identical classes
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter[6] = parameter[0]
        model.head.bias[6] += 1e-5
        proof = prove(twins, model, about, sample, "ONNX")
        assert 200 < proof.same < 359
        assert f"{359 - proof.same} tied" in proof.table()
        model.head.bias[6] += 1
        with pytest.raises(UserError, match=r"and [1-9]\d* of 359 answers differ"):
            prove(twins, model, about, sample, "ONNX")


def test_a_label_on_its_threshold_is_no_failure(tmp_path):
    about = card(Multilabel(NAMES, (0.5, 0.3, 0.6)))
    sample = Sample(np.random.default_rng(0).integers(0, 256, (8, 3, 8, 12), np.uint8), "noise")
    model = randomise(models.build(VIT))
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.copy_(torch.tensor([0.0, 5.0, -5.0]))  # the first is on its threshold, the others are clear
        write(tmp_path / "edge.onnx", model, about, preprocess=False)
        model.head.bias[0] = -1e-5
        assert prove(tmp_path / "edge.onnx", model, about, sample, "ONNX").same == 0
        model.head.bias[0] = -1
        with pytest.raises(UserError, match="and 8 of 8 answers differ"):
            prove(tmp_path / "edge.onnx", model, about, sample, "ONNX")


def test_a_file_that_fails_is_not_kept(tampered, trained, tmp_path, monkeypatch):
    wrong, out = tampered(np.negative), tmp_path / "out"
    monkeypatch.setattr("vitrail.export.onnx.write", lambda path, *_: shutil.copy(wrong, path))
    with pytest.raises(UserError, match="No file was written"):
        vitrail.export(trained, out=out / "model.onnx")
    assert not list(out.iterdir())
    (out / "model.onnx").write_text("older")
    with pytest.raises(UserError, match="No file was written"):
        vitrail.export(trained, out=out / "model.onnx", overwrite=True)
    assert [path.read_text() for path in out.iterdir()] == ["older"]


def test_weights_without_data_are_checked_on_random_pixels(tmp_path, capsys):
    path = tmp_path / "weights.safetensors"
    save(path, randomise(models.build(VIT)), card())
    path.with_suffix(".onnx").write_text("older")
    path.with_suffix(".onnx.data").write_text("older weights")
    with pytest.raises(SystemExit) as exit:
        main(["export", str(path), "--overwrite", "--no-preprocess"])
    assert exit.value.code == 0
    said = capsys.readouterr().out
    assert re.search(r"^checked on +random pixels, because .* so its training data is unknown", said, re.M)
    assert re.search(r"^answers +64 of 64 the same$", said, re.M)
    assert onnx.load(path.with_suffix(".onnx")).producer_name == "vitrail"
    assert not path.with_suffix(".onnx.data").exists()


def test_deep_images_are_rounded(tmp_path):
    """Resized, they have fractions; the file reads whole numbers."""
    pixels = np.random.default_rng(0).integers(0, 65536, (20, 16, 18, 1), np.uint16)
    np.savez(tmp_path / "deep.npz", x_train=pixels, y_train=np.arange(20) % 3, x_test=pixels, y_test=np.arange(20) % 3)
    config = replace(VIT, channels=1)
    about = Card(
        model="deep", config=config, task=Multiclass(("0", "1", "2")), preprocess=Preprocess((8, 12), 1, bits=16)
    )
    save(tmp_path / "model.safetensors", models.build(config), about)
    sample = to_check(tmp_path, about, tmp_path / "deep.npz", 1)
    assert (sample.source, sample.pixels.shape) == ("20 images of deep, split val", (20, 1, 8, 12))
    assert {image.shape for image in sample.whole} == {(16, 18, 1)}
    difference = np.abs(sample.pixels - np.stack([about.preprocess.pixels(image) for image in pixels]))
    assert 0 < difference.max() <= 0.5


def test_images_to_check_with_need_no_labels(trained, tmp_path):
    for i, image in enumerate(np.random.default_rng(0).integers(0, 256, (5, 8, 8), np.uint8)):
        Image.fromarray(image).save(tmp_path / f"{i}.png")
    sample = to_check(trained, open_run(trained)[1], tmp_path, 1)
    assert (len(sample), sample.targets) == (5, None)
    assert sample.source.startswith("5 images of")
    with pytest.raises(UserError, match="There is no data"):
        to_check(trained, open_run(trained)[1], tmp_path / "nowhere", 1)


def test_what_is_there_is_not_replaced(exported, trained):
    with pytest.raises(UserError, match=r"digits\.onnx exists.*--overwrite"):
        vitrail.export(trained, out=exported.file)


def test_other_endings_are_refused(trained, tmp_path):
    with pytest.raises(UserError, match=r"must be an \.onnx file, but it is .*model\.pt\. Name it model\.pt\.onnx\."):
        vitrail.export(trained, out=tmp_path / "model.pt")
    with pytest.raises(UserError, match=r"must be an \.xml file"):
        vitrail.export(trained, format="openvino", out=tmp_path / "model.onnx")


def test_a_missing_package_names_the_extra(trained, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UserError, match=r"needs onnxruntime, which is not installed: pip install 'vitrail\[export\]'"):
        vitrail.export(trained)


def test_a_model_without_a_head_is_refused(tmp_path):
    body = models.create("vit_ti16", depth=1, img_size=16).state_dict()
    save_file({name: value for name, value in body.items() if "head" not in name}, tmp_path / "body.safetensors")
    with pytest.raises(UserError, match=r"has no classification head, so .* Train one: vitrail train DATA --weights"):
        vitrail.export(tmp_path / "body.safetensors")


def test_all_runtimes_give_the_same_answers(trained, exported, openvino, digits):
    """PyTorch, ONNX Runtime and OpenVINO, on 200 images that need resizing."""
    files = sorted(digits.rglob("*.png"))[:200]
    images = [Image.open(file).resize((8 + i % 5, 8 + i % 3)) for i, file in enumerate(files)]
    expected, *others = ([*Predictor(source)(images, top=1)] for source in (trained, exported.file, openvino))
    for answers in others:
        assert [answer.labels for answer in answers] == [answer.labels for answer in expected]
        shares = [[answer.probabilities for answer in each] for each in (answers, expected)]
        np.testing.assert_allclose(*shares, atol=0.05)  # by a grey level here and there


@pytest.mark.parametrize("format", ["onnx", "openvino"])
def test_exported_files_are_predicted_and_evaluated_without_torch(format, exported, openvino, digits, tmp_path):
    """Nor do they need what torch brings along."""
    file = exported.file if format == "onnx" else openvino
    code = f"""
import sys
for name in ("torch", "scipy", "safetensors", "tensorboardX", "jinja2"):
    sys.modules[name] = None
from vitrail.cli import run
assert run(["predict", {str(file)!r}, {str(digits / "0")!r}, "--top", "1"]) == 0
assert run(["evaluate", {str(file)!r}, {str(digits)!r}, "--split", "all", "--out", {str(tmp_path)!r}]) == 0
"""
    subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads((tmp_path / "metrics.json").read_text())["top1"] > 0.5
