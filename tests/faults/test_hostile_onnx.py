"""ONNX files that refer to other files, or whose card does not fit their graph: one sentence."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

import vitrail
from vitrail.errors import UserError
from vitrail.runs.exported import ExportedModel, exported_card
from vitrail.runs.onnx import check_external

pytestmark = pytest.mark.usefixtures("plain_runs")


@pytest.mark.parametrize("place", ["/etc/hostname", "../secret", "other.bin", "model.onnx.data"])
def test_weights_outside_an_onnx_file(exported, tmp_path, place):
    import onnx

    model = onnx.load(exported.file)
    tensor = model.graph.initializer[0]
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=place)
    folder = tmp_path / "inner"
    folder.mkdir()
    (tmp_path / "secret").write_bytes(bytes(10_000))
    (folder / "other.bin").write_bytes(bytes(10_000))
    (folder / "model.onnx.data").symlink_to(tmp_path / "secret")
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(UserError, match=r"may have weights only in model\.onnx\.data"):
        exported_card(folder / "model.onnx")


@pytest.mark.parametrize("length", [b"\x08", b"\x88\x00", b"\x88\x80\x00"])
def test_a_reference_is_found_however_its_length_is_written(tmp_path, monkeypatch, length):
    monkeypatch.setitem(sys.modules, "onnx", None)  # not installed, and not needed for class names
    (tmp_path / "a.onnx").write_bytes(b"\x0a" + length + b"location\x12\x01x")
    with pytest.raises(UserError, match="weights in other files need onnx"):
        check_external(tmp_path / "a.onnx")
    (tmp_path / "a.onnx").write_bytes(b'["filming location"]')
    check_external(tmp_path / "a.onnx")


def test_weights_beside_an_onnx_file_are_part_of_its_fingerprint(exported, tmp_path):
    file = Path(shutil.copy(exported.file, tmp_path / "a.onnx"))
    found = set()
    for content in (None, b"1", b"2"):
        if content is not None:
            file.with_name("a.onnx.data").write_bytes(content)
        found.add(ExportedModel(file).fingerprint())
    assert len(found) == 3


@pytest.mark.parametrize("damage", ["classes", "deep", "nan"])
def test_a_teacher_is_tried_before_a_run_folder_exists(exported, tmp_path, tiny, damage):
    import onnx

    model = onnx.load(exported.file)
    entry = next(entry for entry in model.metadata_props if entry.key == "vitrail")
    if damage == "classes":
        document = json.loads(entry.value)
        document["classes"] = document["classes"][:9]
        document["config"]["classes"] = 9
        entry.value = json.dumps(document)
    elif damage == "deep":
        entry.value = "[" * 100_000
    else:
        for tensor in model.graph.initializer:
            if tensor.data_type == onnx.TensorProto.FLOAT:
                values = onnx.numpy_helper.to_array(tensor) * np.float32("nan")
                tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(UserError, match=r"model\.onnx"):
        vitrail.train("digits", out=tmp_path / "runs", name="run", teacher=str(tmp_path / "model.onnx"), **tiny)
    assert not (tmp_path / "runs").exists()
