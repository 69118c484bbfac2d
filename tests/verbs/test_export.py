"""Exported files give the answers of PyTorch, say what they are, and are not kept if they do not."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from peers import randomise
from PIL import ExifTags, Image
from safetensors.torch import save_file
from torch import Tensor, nn

import vitrail
from vitrail import models
from vitrail.cli import main
from vitrail.data.preprocess import Preprocess
from vitrail.errors import UserError
from vitrail.export import Proof
from vitrail.export import onnx as writing
from vitrail.export.onnx import describe_preprocessing, write
from vitrail.export.proof import images_to_check, prove
from vitrail.models import ModelConfig
from vitrail.models.bit import BiTConfig
from vitrail.models.coatnet import CoAtNetConfig
from vitrail.models.hybrid import HybridConfig
from vitrail.models.mixer import MixerConfig
from vitrail.models.pvt import PVTConfig
from vitrail.models.pvt_v2 import PVTv2Config
from vitrail.models.swin import SwinConfig
from vitrail.models.vit import ViTConfig
from vitrail.tasks import Multiclass, Multilabel, Regression, Task
from vitrail.weights import Card, open_run, save

DOCS = Path(__file__).parent.parent.parent / "docs"
POOLS, POSITIONS = (get_args(get_type_hints(ViTConfig)[field]) for field in ("pool", "pos"))
VIT = ViTConfig(width=16, depth=1, heads=2, mlp=32, patch=4, img_size=(8, 12), classes=3)


class Together(nn.Module):
    """Several models that read the same images, with their logits side by side: one export serves them all."""

    def __init__(self, configs: list[ModelConfig]):
        super().__init__()
        self.parts = nn.ModuleList(map(models.build, configs))

    def forward(self, images: Tensor) -> Tensor:
        return torch.cat([part(images) for part in self.parts], dim=1)


def vits() -> list[ModelConfig]:
    """Every pool and every position, and every switch."""
    switched = replace(VIT, pos="relative", head="tanh", stem="conv", act="swiglu", registers=2, layer_scale=0.1)
    return [*(replace(VIT, pool=pool, pos=pos) for pool, pos in zip(POOLS, cycle(POSITIONS))), switched]


NAMES = ("class 0", "class 1", "class 2")


def card(config: ModelConfig, task: Task | None = None, bits: int = 8) -> Card:
    mean, std = (0.1, 0.5, 0.3, 0.2)[: config.channels], (0.2, 0.3, 0.1, 0.4)[: config.channels]
    preprocess = Preprocess(config.img_size, config.channels, mean=mean, std=std, bits=bits)
    return Card(model="a model", config=config, task=task or Multiclass(NAMES), preprocess=preprocess)


# A model of each family, and among them every task and every kind of pixels.
SIZE: dict[str, Any] = {"img_size": (16, 24), "classes": 3}
CASES: dict[str, tuple[Callable[[], nn.Module], Card]] = {
    name: (lambda config=about.config: models.build(config), about)
    for name, about in {
        "hybrid, 4 channels": card(HybridConfig(16, 1, 2, 32, (16, 32), (1, 1), first=4, groups=2, **SIZE, channels=4)),
        "bit, regression": card(
            BiTConfig((16, 32), (1, 1), groups=2, **SIZE, channels=1),
            Regression(NAMES, (5.0, -200.0, 0.0), (0.1, 30.0, 2.0)),
        ),
        "mixer, labels, 16 bits": card(
            MixerConfig(16, 1, 8, 32, patch=4, img_size=(8, 12), channels=1, classes=3),
            Multilabel(NAMES, (0.5, 0.3, 0.6)),
            bits=16,
        ),
        "swin": card(SwinConfig((8, 16), (2, 1), (2, 4), window=3, patch=2, img_size=(15, 22), classes=3)),
        "pvt, floats": card(PVTConfig((8, 16), (1, 1), (1, 2), (4, 2), (2, 1), patch=4, **SIZE), bits=32),
        "pvt_v2": card(PVTv2Config((8, 16), (1, 1), (1, 2), (4, 2), (2, 1), img_size=(17, 23), classes=3)),
        "pvt_v2, linear": card(
            PVTv2Config((8, 16), (1, 1), (1, 2), (4, 2), (2, 1), True, img_size=(17, 23), classes=3)
        ),
        "coatnet": card(CoAtNetConfig((16, 32, 32), (1, 1, 1), 8, convs=1, img_size=(25, 32), classes=3)),
    }.items()
}
CASES["vits"] = (lambda: Together(vits()), card(VIT, Multiclass(tuple(f"class {i}" for i in range(3 * len(vits()))))))


def noise(about: Card, batch: int) -> NDArray[Any]:
    """Pixels of every value that there can be."""
    random, shape = np.random.default_rng(batch), (batch, *about.preprocess.img_size, about.preprocess.channels)
    if about.preprocess.bits == 32:
        return random.normal(size=shape).astype(np.float32)
    kind = {8: np.uint8, 16: np.uint16}[about.preprocess.bits]
    return random.integers(0, np.iinfo(kind).max, shape, kind, endpoint=True)


@pytest.mark.parametrize(("build", "about"), CASES.values(), ids=CASES)
def test_every_family_gives_what_pytorch_gives(build, about, tmp_path):
    model = randomise(build())
    write(tmp_path / "model.onnx", model, about)
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    for batch in (1, 3):
        pixels = noise(about, batch)
        logits, meant = map(torch.from_numpy, session.run(None, {"pixels": pixels}))
        white = {8: 255, 16: 65535, 32: 1}[about.preprocess.bits]
        images = (pixels / np.float64(white) - about.preprocess.mean) / about.preprocess.std
        with torch.no_grad():
            expected = model(torch.from_numpy(images.transpose(0, 3, 1, 2)).float())
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert batch == 1 or not torch.allclose(logits[0], logits[1])
        if isinstance(about.task, Regression):
            expected = expected * torch.tensor([0.1, 30, 2]) + torch.tensor([5, -200, 0])
        else:
            expected = expected.sigmoid() if isinstance(about.task, Multilabel) else expected.softmax(1)
        torch.testing.assert_close(meant, expected, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory) -> Proof:
    return vitrail.export(trained, out=tmp_path_factory.mktemp("exported") / "digits.onnx")


@pytest.fixture
def tampered(exported, tmp_path) -> Callable[[Callable[[NDArray[Any]], NDArray[Any]]], Path]:
    """Makes a copy of the exported file with another head."""

    def tamper(change: Callable[[NDArray[Any]], NDArray[Any]]) -> Path:
        graph = onnx.load(exported.file)
        (head,) = [tensor for tensor in graph.graph.initializer if tensor.name == "model.head.weight"]
        head.CopyFrom(onnx.numpy_helper.from_array(change(onnx.numpy_helper.to_array(head)), head.name))
        onnx.save(graph, tmp_path / "tampered.onnx")
        return tmp_path / "tampered.onnx"

    return tamper


def test_the_proof_lies_beside_the_file(exported):
    assert sorted(path.name for path in exported.file.parent.iterdir()) == ["digits.onnx", "digits.onnx.json"]
    document = json.loads(exported.file.with_name("digits.onnx.json").read_text())
    assert document == json.loads(json.dumps(exported.to_json()))
    assert document["source"] == "64 images of digits, split val"
    assert (document["images"], document["same_answers"]) == (64, 1.0)
    assert set(document["differences"]) == {"logits", "probabilities"}
    assert 0 < document["differences"]["logits"]["relative"] < 1e-4
    assert document["files"]["digits.onnx"]["bytes"] == exported.file.stat().st_size
    assert {name: set(speeds) for name, speeds in document["milliseconds_per_image"].items()} == {
        "PyTorch": {"1", "32"},
        "onnxruntime": {"1", "32"},
    }
    assert document["versions"]["onnxruntime"] == onnxruntime.__version__
    assert re.search(r"^answers +64 of 64 the same$", exported.table(), re.M)


def test_the_file_says_what_it_is(exported, trained):
    session = onnxruntime.InferenceSession(exported.file)
    (pixels,) = session.get_inputs()
    assert (pixels.name, pixels.type, pixels.shape) == ("pixels", "tensor(uint8)", ["batch", 8, 8, 1])
    assert [(o.name, o.shape) for o in session.get_outputs()] == [
        ("logits", ["batch", 10]),
        ("probabilities", ["batch", 10]),
    ]
    about = session.get_modelmeta().custom_metadata_map
    assert Card.from_json(json.loads(about["vitrail"])) == open_run(trained)[1]
    assert json.loads(about["names"]) == list("0123456789")
    assert about["task"] == "multiclass"
    assert "crop the centre 8 x 8" in about["preprocess"]
    graph = onnx.load(exported.file)
    onnx.checker.check_model(graph, full_check=True)
    assert [(opset.domain, opset.version) for opset in graph.opset_import] == [("", 18)]
    assert not [node for node in graph.graph.node if node.doc_string or node.metadata_props]  # paths of this machine


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
    pixels, source = images_to_check(trained, about, None, 1)
    assert prove(exported.file, model, about, pixels[:5], source).same == 5
    with pytest.raises(
        UserError, match=r"differs from the model: on 64 images of digits, split val its outputs differ"
    ):
        prove(tampered(change), model, about, pixels, source)


def test_an_answer_between_two_that_are_as_good_is_no_failure(trained, tmp_path):
    model, about = open_run(trained)
    pixels, source = images_to_check(trained, about, None, 1)
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter[6] = parameter[0]  # classes that nobody can tell apart
        write(tmp_path / "twins.onnx", model, about)
        model.head.bias[6] += 1e-5
        proof = prove(tmp_path / "twins.onnx", model, about, pixels, source)
        assert 40 < proof.same < 64
        assert f"{64 - proof.same} tied" in proof.table()
        model.head.bias[6] += 1
        with pytest.raises(UserError, match=r"and [1-9]\d* of 64 answers differ"):
            prove(tmp_path / "twins.onnx", model, about, pixels, source)


def test_a_label_on_its_threshold_is_no_failure(tmp_path):
    about = card(VIT, Multilabel(NAMES, (0.5, 0.3, 0.6)))
    model = randomise(models.build(VIT))
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.copy_(torch.tensor([0.0, 5.0, -5.0]))  # the first is on its threshold, the others are clear
        write(tmp_path / "edge.onnx", model, about)
        model.head.bias[0] = -1e-5
        assert prove(tmp_path / "edge.onnx", model, about, noise(about, 8), "noise").same == 0
        model.head.bias[0] = -1
        with pytest.raises(UserError, match="and 8 of 8 answers differ"):
            prove(tmp_path / "edge.onnx", model, about, noise(about, 8), "noise")


def test_a_file_that_fails_is_not_kept(tampered, trained, tmp_path, monkeypatch):
    wrong, out = tampered(np.negative), tmp_path / "out"
    monkeypatch.setattr("vitrail.export.write.write", lambda path, *_: shutil.copy(wrong, path))
    with pytest.raises(UserError, match="No file was written"):
        vitrail.export(trained, out=out / "model.onnx")
    assert not list(out.iterdir())
    (out / "model.onnx").write_text("older")
    with pytest.raises(UserError, match="No file was written"):
        vitrail.export(trained, out=out / "model.onnx", overwrite=True)
    assert [path.read_text() for path in out.iterdir()] == ["older"]


def test_large_weights_lie_beside_the_file(exported, trained, tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "_ONE_FILE", 1000)
    writing.save(onnx_ir.load(exported.file), tmp_path / "large.onnx")
    model, about = open_run(trained)
    proof = prove(tmp_path / "large.onnx", model, about, *images_to_check(trained, about, None, 1))
    assert list(proof.parts) == ["large.onnx", "large.onnx.data"]
    assert proof.parts["large.onnx"].bytes < proof.parts["large.onnx.data"].bytes
    assert re.search(r"^weights +large.onnx.data, .* must stay next to it$", proof.table(), re.M)


def test_weights_without_data_are_checked_on_random_pixels(tmp_path, capsys):
    path = tmp_path / "weights.safetensors"
    save(path, randomise(models.build(VIT)), card(VIT))
    path.with_suffix(".onnx").write_text("older")
    path.with_suffix(".onnx.data").write_text("older weights")
    with pytest.raises(SystemExit) as exit:
        main(["export", str(path), "--overwrite"])
    assert exit.value.code == 0
    said = capsys.readouterr().out
    assert re.search(r"^checked on +random pixels, because .* so its training data is unknown", said, re.M)
    assert re.search(r"^answers +64 of 64 the same$", said, re.M)
    assert onnx.load(path.with_suffix(".onnx")).producer_name == "vitrail"
    assert not path.with_suffix(".onnx.data").exists()


@pytest.mark.parametrize("name", CASES)
def test_random_pixels_are_those_that_the_model_expects(name, tmp_path):
    _, about = CASES[name]
    task = replace(about.task, classes=about.classes[:3])
    save(tmp_path / "model.safetensors", models.build(about.config), replace(about, task=task))
    pixels, _ = images_to_check(tmp_path, about, None, 1)
    assert pixels.dtype == noise(about, 1).dtype
    assert pixels.shape == (64, *about.preprocess.img_size, about.preprocess.channels)
    images = about.preprocess.normalise(torch.from_numpy(pixels.astype(np.float32).transpose(0, 3, 1, 2)))
    assert 0.3 < images.std() < 10


def test_deep_images_are_rounded(tmp_path):
    """Resized, they have fractions; the file reads whole numbers."""
    pixels = np.random.default_rng(0).integers(0, 65536, (20, 16, 18, 1), np.uint16)
    np.savez(tmp_path / "deep.npz", x_train=pixels, y_train=np.arange(20) % 3, x_test=pixels, y_test=np.arange(20) % 3)
    about = replace(CASES["mixer, labels, 16 bits"][1], task=Multiclass(("0", "1", "2")))
    save(tmp_path / "model.safetensors", models.build(about.config), about)
    read, source = images_to_check(tmp_path, about, tmp_path / "deep.npz", 1)
    assert source == "20 images of deep, split val"
    assert (read.dtype, read.shape) == (np.uint16, (20, 8, 12, 1))
    expected = np.stack([about.preprocess.pixels(image) for image in pixels]).transpose(0, 2, 3, 1)
    assert 0 < np.abs(read - expected).max() <= 0.5


def test_description_of_preprocessing():
    assert describe_preprocessing(Preprocess((224, 192), 3, crop=0.875)) == (
        "Rotate the image by its EXIF orientation, resize it (bicubic, antialiased, keeping its aspect ratio) to just "
        "cover 256 x 219 (height x width), crop the centre 224 x 192, and pass its pixels (batch, height, width, "
        "channels), RGB, as uint8, 0 to 255. The graph normalises them."
    )
    assert "grey, as uint16, 0 to 65535." in describe_preprocessing(Preprocess((8, 8), 1, bits=16))
    assert "5 channels, as float32, unscaled." in describe_preprocessing(Preprocess((8, 8), 5, bits=32))


def test_what_is_there_is_not_replaced(exported, trained):
    with pytest.raises(UserError, match=r"digits\.onnx exists.*--overwrite"):
        vitrail.export(trained, out=exported.file)


def test_other_endings_are_refused(trained, tmp_path):
    with pytest.raises(UserError, match=r"must be an \.onnx file, but it is .*model\.pt\. Name it model\.pt\.onnx\."):
        vitrail.export(trained, out=tmp_path / "model.pt")


def test_a_missing_package_names_the_extra(trained, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UserError, match=r"needs onnxruntime, which is not installed: pip install 'vitrail\[export\]'"):
        vitrail.export(trained)


def test_a_model_without_a_head_is_refused(tmp_path):
    body = models.create("vit_ti16", depth=1, img_size=16).state_dict()
    save_file({name: value for name, value in body.items() if "head" not in name}, tmp_path / "body.safetensors")
    with pytest.raises(UserError, match=r"has no classification head, so .* Train one: vitrail train DATA --weights"):
        vitrail.export(tmp_path / "body.safetensors")
