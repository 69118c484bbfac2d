"""Engines give the same answers, whichever computes them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from families import ATTENTIVE, TINY, batch
from peers import randomise
from torch import Tensor, nn

import vitrail
from vitrail.errors import UserError
from vitrail.models import Model, build
from vitrail.runs.engine import PROGRAMS, Engine, Features, check_engine, computes_bf16, is_installed
from vitrail.runs.exported import open_session
from vitrail.runs.predictor import Predictor

pytestmark = pytest.mark.usefixtures("plain_runs")

NAMES = [name for name, p in PROGRAMS.items() if (name == "bf16" and computes_bf16()) or p.available()]


@pytest.fixture(scope="module")
def files(digits) -> list[Path]:
    return sorted(digits.rglob("*.png"))[:20]


@pytest.mark.parametrize("name", NAMES)
def test_a_named_engine_predicts_the_same_labels_for_any_number_of_images(trained, files, name):
    for some in (files, files[:1]):
        plain = list(vitrail.predict(trained, some, engine="torch", batch_size=8))
        other = list(vitrail.predict(trained, some, engine=name, batch_size=8))
        assert [p.file for p in other] == [p.file for p in plain]
        rough = 10 * PROGRAMS[name].tolerance
        for ours, theirs in zip(plain, other, strict=True):
            first = dict(zip(theirs.labels, theirs.probabilities, strict=True))
            assert first[ours.labels[0]] == pytest.approx(ours.probabilities[0], abs=rough)


@pytest.mark.parametrize("name", NAMES)
def test_a_named_engine_embeds_the_same_vectors(trained, files, name, monkeypatch):
    program, seen = PROGRAMS[name], []

    def make(module, images):
        compute = program.make(module, images)
        return lambda images: (seen.append(len(images)), compute(images))[1]

    monkeypatch.setitem(PROGRAMS, name, replace(program, make=make))
    plain, other = (
        np.stack([e.features for e in vitrail.embed(trained, files, engine=engine, batch_size=8)])
        for engine in ("torch", name)
    )
    np.testing.assert_allclose(other, plain, atol=program.tolerance * np.abs(plain).max())
    assert seen == [8, 8, 4]


@pytest.mark.parametrize("name", NAMES)
def test_evaluate_records_the_engine(trained, tmp_path, name):
    plain = vitrail.evaluate(trained, engine="torch", out=tmp_path / "plain")
    other = vitrail.evaluate(trained, engine=name, out=tmp_path / "other")
    assert other.top1 == pytest.approx(plain.top1, abs=0.02)
    used = [json.loads((tmp_path / part / "metrics.json").read_text())["engine"] for part in ("plain", "other")]
    assert used == ["torch", name]


class Both(nn.Module):
    """The outputs and the features of a model side by side: one conversion serves both."""

    def __init__(self, model: Model):
        super().__init__()
        self.model, self.features = model, Features(model)

    def forward(self, images: Tensor) -> Tensor:
        return torch.cat([self.model(images), self.features(images)], dim=1)


OTHERS = ("vit, windows", "vit, axial", "swin, padded", "pvt_v2, linear")  # what the smallest models do not have
CONFIGS = TINY | {name: ATTENTIVE[name] for name in OTHERS}


@pytest.mark.skipif(not is_installed("openvino"), reason="needs openvino")
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@torch.inference_mode()
def test_openvino_computes_every_family_at_any_batch_size(config):
    model = randomise(build(config)).eval()
    images, both = batch(model, 5), Both(model).eval()
    compute = PROGRAMS["openvino"].make(both, images)
    for part in images.split([3, 1, 1]):
        torch.testing.assert_close(compute(part), both(part), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not is_installed("openvino"), reason="needs openvino")
def test_openvino_reports_nothing_to_its_authors(trained, files, tmp_path):
    code = f"""import sys, vitrail
list(vitrail.predict({str(trained)!r}, [{str(files[0])!r}], engine="openvino"))
assert "openvino" in sys.modules and sys.modules["openvino_telemetry"] is None"""
    environment = {"HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert not (tmp_path / "intel").exists()  # where it would keep the number of this machine


@pytest.mark.skipif(not is_installed("openvino"), reason="needs openvino")
def test_a_damaged_openvino_file_is_refused_also_if_its_error_is_no_utf8(tmp_path):
    layers = b'<layers><layer id="0" name="a" type="Parameter" version="\xff"/></layers>'
    (tmp_path / "model.bin").touch()
    (tmp_path / "model.xml").write_bytes(b'<net name="a" version="11">' + layers + b"<edges/></net>")
    with pytest.raises(UserError, match=r"model\.xml is not a valid OpenVINO file"):
        open_session(tmp_path / "model.xml")


@pytest.mark.skipif(is_installed("openvino"), reason="openvino is installed")
def test_an_engine_that_is_not_installed_is_named(trained, files):
    with pytest.raises(UserError, match=r"openvino needs OpenVINO: pip install 'vitrail\[openvino\]'"):
        vitrail.predict(trained, files, engine="openvino")


def test_an_engine_that_does_not_exist_is_refused(trained, files):
    with pytest.raises(UserError, match=r"no engine 'pakced'. Did you mean 'packed'\?"):
        vitrail.predict(trained, files, engine="pakced")
    with pytest.raises(UserError, match="no engine 'x'"):
        vitrail.evaluate(trained, method="knn", engine="x")


def test_engines_other_than_torch_need_the_cpu():
    with pytest.raises(UserError, match="packed runs on the CPU only, but the device is cuda"):
        check_engine("packed", "cuda")
    check_engine("torch", "cuda")
    check_engine("auto", "cuda")


def test_a_model_in_memory_is_computed_as_it_is():
    model = randomise(build(TINY["pvt"])).eval()
    images = batch(model)
    with torch.no_grad():
        assert torch.equal(Engine(model, None, "cpu", "torch")(images), model(images))
        assert torch.equal(Engine(model, None, "cpu", "torch", "features")(images), model.embed(images))


def test_a_short_job_tests_no_engines(trained, files, tmp_path):
    code = f"""import sys, vitrail
predictor = vitrail.Predictor({str(trained)!r})
list(predictor({list(map(str, files))!r}))
print(predictor.engine, *({{"openvino", "onnxruntime", "vitrail.explain"}} & set(sys.modules)))"""
    environment = {"VITRAIL_CACHE": str(tmp_path / "cache"), "PYTHONPATH": ":".join(sys.path)}
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert answer.stdout.split() == ["torch"]
    assert not (tmp_path / "cache" / "engines.json").exists()


def test_an_onnx_file_has_its_own_engine(tmp_path):
    with pytest.raises(UserError, match=r"is an exported file, which only its own runtime computes. Remove --engine."):
        Predictor(tmp_path / "model.onnx", engine="packed")


def test_bf16_needs_a_cpu_that_computes_it(monkeypatch):
    monkeypatch.setattr("vitrail.runs.engine.computes_bf16", lambda: False)
    with pytest.raises(UserError, match="bf16 needs a CPU with AVX-512"):
        check_engine("bf16", "cpu")
