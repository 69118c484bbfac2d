"""int8 files: what they lose, which layers are to blame, and what is left in float32."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

import vitrail
from vitrail.errors import UserError
from vitrail.export.attention import split_qkv
from vitrail.export.int8 import measure_damage, measure_ranges
from vitrail.export.onnx import QUANTISED
from vitrail.export.sample import to_calibrate
from vitrail.runs.predictor import Predictor
from vitrail.weights import open_run


@pytest.fixture(scope="module", autouse=True)
def _written_once(exported):
    """The float32 ONNX file, from which all int8 files are made, is that of `exported`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitrail.export.onnx.write", lambda path, *_: shutil.copy(exported.file, path))
        yield


@pytest.fixture(scope="module")
def proof(trained, tmp_path_factory):
    return vitrail.export(trained, int8=True, out=tmp_path_factory.mktemp("int8") / "small.onnx", max_drop=2)


def quantised(file: Path) -> int:
    """The number of linear layers with quantised weights."""
    nodes = onnx.load(file).graph.node
    integers = {node.output[0] for node in nodes if node.op_type == "DequantizeLinear"}
    return sum(node.op_type in ("MatMul", "Gemm") and node.input[1] in integers for node in nodes)


def test_an_onnx_file_is_quantised(proof, exported, trained, digits):
    assert proof.file.stat().st_size < 0.4 * exported.file.stat().st_size
    assert abs(proof.drop) <= 2
    assert proof.same >= 0.97 * proof.images
    document = json.loads(proof.file.with_name("small.onnx.json").read_text())
    assert (document["precision"], document["float32_layers"]) == ("int8", [])
    assert document["calibrated_on"] == "256 images of digits, split train"
    assert set(document["speed"]) == {"PyTorch", "ONNX"}
    assert quantised(proof.file) == 37  # six in each of six blocks, as queries, keys and values are apart, and the head
    files = sorted(digits.rglob("*.png"))[::6]
    ours, theirs = ([p.labels for p in Predictor(source)(files, top=1)] for source in (trained, proof.file))
    assert np.mean([a == b for a, b in zip(ours, theirs, strict=True)]) >= 0.95


def test_openvino_is_quantised_by_nncf(trained, tmp_path):
    proof = vitrail.export(trained, format="openvino", int8=True, out=tmp_path / "small.xml", max_drop=2)
    assert proof.same >= 0.97 * proof.images
    assert proof.parts["small.bin"].bytes < 1_200_000  # a third of float32


def test_the_damaged_layer_is_found(trained):
    model, card = open_run(trained)
    images = card.preprocess.normalise(torch.from_numpy(to_calibrate(trained, card, None, 1).pixels))
    with torch.no_grad():  # one output a thousand times as large as the others: its scale serves none of them
        layer = model.get_submodule("blocks.2.mlp.fc2")
        model.get_submodule("blocks.2.mlp.fc1").weight[0] *= 1000
        layer.weight[:, 0] = 0
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ranges = measure_ranges(model, images, QUANTISED)
    damage = measure_damage(model, images, ranges)
    assert next(iter(damage)) == "blocks.2.mlp.fc2"
    assert "patch_embed.proj" not in damage  # a convolution, which ONNX files keep
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_too_much_loss_leaves_nothing_and_names_the_layers(trained, tmp_path, monkeypatch):
    monkeypatch.setattr("vitrail.export.proof.Proof.drop", 3.0)
    with pytest.raises(UserError, match=r"int8 loses 3\.00 points on 359 images .* layers that hurt most.* blocks\."):
        vitrail.export(trained, int8=True, out=tmp_path / "small.onnx")
    assert not list(tmp_path.iterdir())


def test_auto_leaves_the_most_damaged_layers_in_float32(trained, tmp_path, monkeypatch):
    drops = iter([3.0, 1.0, 0.9, 0.9, 0.4, 0.4, 0.4])
    monkeypatch.setattr("vitrail.export.proof.Proof.drop", property(lambda self: next(drops) if self.int8 else 0.0))
    proof = vitrail.export(trained, int8="auto", out=tmp_path / "small.onnx")
    model, card = open_run(trained)
    images = card.preprocess.normalise(torch.from_numpy(to_calibrate(trained, card, None, 1).pixels))
    layers = split_qkv(model)
    damage = measure_damage(layers, images, measure_ranges(layers, images, QUANTISED))
    assert 0 < len(proof.kept) < len(damage)
    assert list(proof.kept) == list(damage)[: len(proof.kept)]
    assert quantised(proof.file) == len(damage) - len(proof.kept)


def test_calibration_needs_images_and_int8(trained, tmp_path):
    with pytest.raises(UserError, match=r"--calibrate applies to --int8 only"):
        vitrail.export(trained, calibrate="digits", out=tmp_path / "small.onnx")
    weights = tmp_path / "alone.safetensors"
    weights.write_bytes((trained / "model.safetensors").read_bytes())
    weights.with_suffix(".json").write_bytes((trained / "model.json").read_bytes())
    with pytest.raises(UserError, match=r"int8 needs images to calibrate with.* --calibrate DATA"):
        vitrail.export(weights, int8=True, data="digits", out=tmp_path / "small.onnx")
